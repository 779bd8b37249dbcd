//! The files of the data set, as users name them.

use std::path::{Component, Path, PathBuf};

use super::{JobFacts, LineageError};

impl JobFacts {
    /// The file whose path ends with `name`, or is it if both are absolute.
    pub(super) fn file_named(&self, name: &str) -> Result<usize, LineageError> {
        let end = name.trim_start_matches("./");
        let folder = self.folder.as_deref().unwrap_or_else(|| Path::new(""));
        let absolute = Some(without_dots(Path::new(name))).filter(|path| path.is_absolute());
        let is_named = |path: &str| {
            let before = path.trim_start_matches("./").strip_suffix(end);
            before.is_some_and(|before| before.is_empty() || before.ends_with('/'))
                || absolute.as_ref().is_some_and(|name| *name == without_dots(&folder.join(path)))
        };
        let named = self.files.iter().enumerate().filter(|(_, file)| is_named(&file.path));
        let named: Vec<(usize, String)> = named.take(2).map(|(i, file)| (i, file.path)).collect();
        match &named[..] {
            [(only, _)] => Ok(*only),
            [] => {
                let first = self.files.iter().next().map(|file| file.path).unwrap_or_default();
                let count = self.files.len();
                Err(LineageError::NoSuchRecord(format!(
                    "none of the job's {count} files is named {name}; the first is {first}"
                )))
            }
            [(_, one), (_, other), ..] => Err(LineageError::NoSuchRecord(format!(
                "{name} names several files, as {one} and {other}; give more of it"
            ))),
        }
    }
}

/// The path without `.` and `..`, by its text alone.
fn without_dots(path: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(whole.pop()),
            part => whole.push(part),
        }
    }
    whole
}
