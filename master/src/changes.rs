//! What has changed since a job of this machine began, so that its steps may come out otherwise.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use elasticdl_proto::FileList;

use crate::jobdir::{JobStart, ProgramSource, quoted, read_start};

/// In what a run of `program` with `args` on these files differs from the job in `root`, as far as
/// the times of files tell; a sentence for each. None, if it is not recorded how the job was
/// started.
#[must_use]
pub fn changes_since(
    root: &Path,
    files: &FileList,
    program: &Path,
    args: &[OsString],
) -> Vec<String> {
    let Ok(JobStart { program: first, args: before, folder, began, copy, .. }) = read_start(root)
    else {
        return Vec::new();
    };
    let (first, folder) = (PathBuf::from(first), PathBuf::from(folder));
    let mut changes = Vec::new();
    // The program may lie elsewhere now.
    if first.file_name() != program.file_name() || before != args {
        changes.push(format!("the job was started with `{}`", line(&first, &before)));
    }
    let is_newer = |path: &Path| is_newer(path, began.at);
    let is_replaced = match &copy {
        Some(copy) if first == program => copy.source(program) != ProgramSource::Original,
        _ => is_newer(program),
    };
    let mut sources: Vec<PathBuf> = is_replaced.then(|| program.to_owned()).into_iter().collect();
    for script in args.iter().map(|arg| folder.join(arg)).filter(|path| is_python(path)) {
        let beside = script.parent().and_then(|folder| fs::read_dir(folder).ok());
        let beside = beside.into_iter().flatten().flatten().map(|entry| entry.path());
        sources.extend(beside.filter(|path| is_python(path) && is_newer(path)));
    }
    sources.dedup();
    changes.extend(changed("of the program", &sources));
    let data = files.iter().map(|file| folder.join(file.path)).filter(|path| is_newer(path));
    changes.extend(changed("of the data", &data.collect::<Vec<_>>()));
    changes
}

fn changed(what: &str, paths: &[PathBuf]) -> Option<String> {
    let since = "written since the job began";
    match paths {
        [] => None,
        [path] => Some(format!("a file {what} was {since}: {}", path.display())),
        [path, ..] => {
            Some(format!("{} files {what} were {since}, such as {}", paths.len(), path.display()))
        }
    }
}

fn is_newer(path: &Path, time: SystemTime) -> bool {
    path.metadata().and_then(|file| file.modified()).is_ok_and(|modified| modified > time)
}

fn is_python(path: &Path) -> bool {
    path.extension() == Some(OsStr::new("py")) && path.is_file()
}

fn line(program: &Path, args: &[OsString]) -> String {
    let words = args.iter().map(|word| quoted(word.as_ref()));
    std::iter::once(quoted(program)).chain(words).collect::<Vec<_>>().join(" ")
}
