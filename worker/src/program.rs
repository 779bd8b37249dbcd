//! What identifies the program of this process.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::io::Read;
use std::path::{Path, PathBuf};

use elasticdl_tables::Table;
use object::{Object as _, ReadCache};
use xxhash_rust::xxh3::xxh3_64;

use crate::model::NamedTensor;
use crate::session::header::encode;
use crate::session::origin::{Origin, Program};
use crate::update::UpdateRule;

/// The origin of this process's replica. `node`: where it runs, if the launcher knows. The settings
/// of a rule that is no optimizer are not known.
pub(crate) fn origin(
    node: &str,
    tensors: &[NamedTensor],
    tables: &[Table],
    rule: &dyn UpdateRule,
) -> Origin {
    let host = match node {
        "" => fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default(),
        node => node.to_owned(),
    };
    let layout: Vec<_> = tensors.iter().map(|tensor| (&tensor.name, &tensor.shape)).collect();
    let of_tables = |table: &Table| (table.name.clone(), table.dim, table.initialization);
    let rows: Vec<_> = tables.iter().map(of_tables).collect();
    let of_rows = |table: &Table| (table.optimizer, table.admission, table.eviction);
    let of_rows: Vec<_> = tables.iter().map(of_rows).collect();
    let program = Program {
        executable: digest_of_executable(Path::new("/proc/self/exe")).unwrap_or(0),
        sources: script().map_or(0, |script| digest_of_sources(&script)),
        version: env!("CARGO_PKG_VERSION").into(),
        tensors: xxh3_64(&encode(&(layout, rows))),
        optimizer: xxh3_64(format!("{:?} {of_rows:?}", rule.as_optimizer()).as_bytes()),
    };
    Origin { host: host.trim().into(), program, serves_tables: false }
}

/// The script that an interpreter runs in this process.
fn script() -> Option<PathBuf> {
    let is_script = |path: &PathBuf| path.extension().is_some_and(|e| e == "py") && path.is_file();
    std::env::args_os().skip(1).map(PathBuf::from).find(is_script)
}

/// Digest of a script and of the other Python files of its folder, and below it.
fn digest_of_sources(script: &Path) -> u64 {
    let mut files = vec![script.to_owned()];
    let mut folders: Vec<PathBuf> = script.parent().map(Path::to_owned).into_iter().collect();
    while let Some(folder) = folders.pop() {
        let folder = if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder };
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let (path, kind) = (entry.path(), entry.file_type());
            let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            let is_foreign = entry.file_name() == "site-packages";
            match kind {
                Ok(kind) if kind.is_dir() && !is_hidden && !is_foreign => folders.push(path),
                Ok(kind) if kind.is_file() && path.extension().is_some_and(|e| e == "py") => {
                    files.push(path);
                }
                _ => {}
            }
            if files.len() > SOURCES_MAX || folders.len() > SOURCES_MAX {
                // A folder with so much in it is no program's own.
                return digest_of_file(script).unwrap_or(0);
            }
        }
    }
    // The folder may have another name elsewhere.
    let digest = |file: &PathBuf| {
        let name = file.file_name().unwrap_or_default().as_encoded_bytes().to_vec();
        (name, digest_of_file(file).unwrap_or(0))
    };
    let mut digests: Vec<(Vec<u8>, u64)> = files.iter().map(digest).collect();
    digests.sort();
    digests.dedup();
    xxh3_64(&encode(&digests))
}

/// Digest of the build id, which the linker computes of an executable's content, and of the file's
/// length: to read all of 260 MB would delay each start by 0.1 s. Of the whole file, where the
/// linker was told to write no build id.
fn digest_of_executable(path: &Path) -> Option<u64> {
    let file = File::open(path).ok()?;
    let bytes = file.metadata().ok()?.len();
    let cache = ReadCache::new(file);
    let id = object::File::parse(&cache).ok().and_then(|object| object.build_id().ok().flatten());
    id.map(|id| xxh3_64(&encode(&(id, bytes)))).or_else(|| digest_of_file(path))
}

/// The standard library's hash is fast in a program that is built without optimization, too. It may
/// differ between releases of Rust: then the executables differ anyway.
fn digest_of_file(path: &Path) -> Option<u64> {
    let mut file = File::open(path).ok()?;
    let (mut digest, mut buffer) = (DefaultHasher::new(), vec![0; BUFFER_BYTES]);
    loop {
        match file.read(&mut buffer).ok()? {
            0 => return Some(digest.finish()),
            bytes => digest.write(&buffer[..bytes]),
        }
    }
}

/// Most files, and most folders at a time, that are taken for a program's sources.
const SOURCES_MAX: usize = 1000;

const BUFFER_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn sources_are_the_python_files_of_the_scripts_folder_wherever_it_lies() {
        let folder = tempfile::tempdir().unwrap();
        let write = |copy: &str, name: &str, text: &str| {
            let path = folder.path().join(copy).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let digest = |copy: &str| digest_of_sources(&folder.path().join(copy).join("train.py"));
        for copy in ["a", "b"] {
            write(copy, "train.py", "import nets.small");
            write(copy, "nets/small.py", "LAYERS = 2");
            write(copy, "notes.txt", copy);
            write(copy, ".venv/lib.py", copy);
        }
        assert_eq!(digest("a"), digest("b"));
        write("b", "nets/small.py", "LAYERS = 3");
        assert_ne!(digest("a"), digest("b"));
    }
    #[test]
    fn an_executable_is_identified_by_its_build_id_and_its_length() {
        let folder = tempfile::tempdir().unwrap();
        let (own, copy) = (Path::new("/proc/self/exe"), folder.path().join("copy"));
        fs::copy(own, &copy).unwrap();
        let same = digest_of_executable(own);
        assert!(same.is_some() && same == digest_of_executable(&copy));
        fs::OpenOptions::new().append(true).open(&copy).unwrap().write_all(b"\n").unwrap();
        assert_ne!(same, digest_of_executable(&copy));
        // A program without a build id, such as a script.
        fs::write(&copy, "#!/bin/sh").unwrap();
        let script = digest_of_executable(&copy);
        assert!(script.is_some() && script == digest_of_file(&copy));
    }
}
