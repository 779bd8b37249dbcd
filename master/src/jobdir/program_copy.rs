//! A copy of the training program's file from when the job began.
//!
//! A rebuild of the program during a job must not result in workers of two versions. So the job
//! keeps the file: as a hard link (build tools and installers replace a file rather than overwrite
//! it), or as a copy where a hard link is not possible. As long as the program's path still has
//! the original file, workers are started from that path, because a program may look for files
//! next to its own.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use serde::{Deserialize, Serialize};
use tracing::debug;

/// A copy of a program's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramCopy {
    path: PathBuf,
    copied: FileId,
    original: FileId,
}

/// Identity of a file's contents, without reading them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileId {
    device: u64,
    inode: u64,
    bytes: u64,
    modified_s: i64,
    modified_ns: i64,
}

/// The file that a worker is started from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramSource<'a> {
    /// The file at the program's path was replaced; this path holds the original.
    Copy(&'a Path),
    /// The file at the program's path is unchanged.
    Original,
    /// The file at the program's path was replaced, and there is no copy of the original.
    Replaced,
}

impl ProgramCopy {
    /// Links or copies the file of `program` to `path`. `None` if that fails, or if the program is
    /// not a binary: a script may find other files by its own path.
    pub(crate) fn make(program: &Path, path: PathBuf) -> Option<Self> {
        match Self::try_make(program, path) {
            Ok(copy) => copy,
            Err(error) => {
                debug!(%error, "the program's file is not copied");
                None
            }
        }
    }

    fn try_make(program: &Path, path: PathBuf) -> io::Result<Option<Self>> {
        let program = program.canonicalize()?;
        let original = FileId::of(&program)?;
        if original.bytes > BYTES_MAX || !is_binary(&program)? {
            return Ok(None);
        }
        if fs::hard_link(&program, &path).is_err() {
            // The file is on another file system or belongs to another user.
            let copied = fs::copy(&program, &path)
                .and_then(|_| fs::set_permissions(&path, fs::Permissions::from_mode(0o700)));
            copied.inspect_err(|_| {
                // A part of it would fill the disk, which may be full.
                let _ = fs::remove_file(&path);
            })?;
        }
        // A file system may be mounted without permission to execute.
        let usable =
            rustix::fs::access(&path, Access::EXEC_OK).is_ok() && FileId::of(&program)? == original;
        if !usable {
            fs::remove_file(&path)?;
            return Ok(None);
        }
        Ok(Some(Self { copied: FileId::of(&path)?, path, original }))
    }

    /// The file to start a worker of `program` from.
    pub(crate) fn source(&self, program: &Path) -> ProgramSource<'_> {
        if FileId::of(program).is_ok_and(|now| now == self.original) {
            return ProgramSource::Original;
        }
        // A file that was overwritten in place has changed under both names.
        if FileId::of(&self.path).is_ok_and(|now| now == self.copied) {
            ProgramSource::Copy(&self.path)
        } else {
            ProgramSource::Replaced
        }
    }
}

impl FileId {
    fn of(path: &Path) -> io::Result<Self> {
        let file = path.metadata()?;
        Ok(Self {
            device: file.dev(),
            inode: file.ino(),
            bytes: file.size(),
            modified_s: file.mtime(),
            modified_ns: file.mtime_nsec(),
        })
    }
}

fn is_binary(path: &Path) -> io::Result<bool> {
    let mut magic = [0; 4];
    match io::Read::read_exact(&mut fs::File::open(path)?, &mut magic) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| magic == *b"\x7fELF"),
    }
}

/// Size limit of files that are copied.
const BYTES_MAX: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    struct Files {
        folder: tempfile::TempDir,
    }

    impl Files {
        fn new() -> Self {
            let files = Self { folder: tempfile::tempdir().unwrap() };
            files.write("\x7fELF old");
            files
        }

        fn program(&self) -> PathBuf {
            self.folder.path().join("program")
        }

        fn copy(&self) -> PathBuf {
            self.folder.path().join("copy")
        }

        fn write(&self, text: &str) {
            fs::write(self.program(), text).unwrap();
            fs::set_permissions(self.program(), fs::Permissions::from_mode(0o755)).unwrap();
        }

        fn make(&self) -> Option<ProgramCopy> {
            ProgramCopy::make(&self.program(), self.copy())
        }
    }

    #[test]
    fn a_rebuilt_program_is_started_from_its_copy() {
        let files = Files::new();
        let copy = files.make().unwrap();
        assert_eq!(copy.source(&files.program()), ProgramSource::Original);
        // Build tools replace the file.
        fs::remove_file(files.program()).unwrap();
        assert_eq!(copy.source(&files.program()), ProgramSource::Copy(&files.copy()));
        files.write("\x7fELF new");
        assert_eq!(copy.source(&files.program()), ProgramSource::Copy(&files.copy()));
        assert_eq!(fs::read(files.copy()).unwrap(), b"\x7fELF old");
    }

    #[test]
    fn a_program_overwritten_in_place_has_no_copy() {
        let files = Files::new();
        let copy = files.make().unwrap();
        files.write("\x7fELF newer");
        assert_eq!(copy.source(&files.program()), ProgramSource::Replaced);
    }

    #[test]
    fn a_script_is_not_copied() {
        let files = Files::new();
        for text in ["#!/bin/sh\ncd $(dirname $0)", "x", ""] {
            files.write(text);
            assert_eq!(files.make(), None, "{text}");
            assert!(!files.copy().exists());
        }
    }
}
