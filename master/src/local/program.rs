//! The training program as it was when the job began.
//!
//! A program that is built again in mid-job must not make workers of two kinds. So the job keeps
//! the file: by a second name for it (builders and installers put a new file in the place of the
//! old one), or as a copy where that can't be. As long as the program's path has the file that the
//! job began with, workers are started by that path, for a program may look for other files beside
//! itself.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use serde::{Deserialize, Serialize};
use tracing::debug;

/// A program's file, and another one that has what was in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramCopy {
    path: PathBuf,
    copied: FileId,
    original: FileId,
}

/// What a file is known by without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileId {
    device: u64,
    inode: u64,
    bytes: u64,
    modified_s: i64,
    modified_ns: i64,
}

/// Which file a worker is started from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProgramSource<'a> {
    /// The program's path has another file by now; this one is as the job began.
    Copy(&'a Path),
    /// The program's path has another file by now, and there is no copy of the one before.
    Replaced,
    /// The program's path.
    Original,
}

impl ProgramCopy {
    /// Keeps the file of `program` at `path`. `None` if it can't be kept, or is no binary: a script
    /// may look for others by its own path.
    #[must_use]
    pub fn make(program: &Path, path: PathBuf) -> Option<Self> {
        match Self::try_make(program, path) {
            Ok(copy) => copy,
            Err(error) => {
                debug!(%error, "the program's file is not kept");
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
            // Of another file system, or of another user.
            fs::copy(&program, &path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
        }
        // Files of some file systems can't be executed.
        let usable =
            rustix::fs::access(&path, Access::EXEC_OK).is_ok() && FileId::of(&program)? == original;
        if !usable {
            fs::remove_file(&path)?;
            return Ok(None);
        }
        Ok(Some(Self { copied: FileId::of(&path)?, path, original }))
    }

    /// What to start a worker of `program` from.
    pub(super) fn source(&self, program: &Path) -> ProgramSource<'_> {
        if FileId::of(program).is_ok_and(|now| now == self.original) {
            return ProgramSource::Original;
        }
        // A file that was written to in its place has changed under both names.
        match FileId::of(&self.path).is_ok_and(|now| now == self.copied) {
            true => ProgramSource::Copy(&self.path),
            false => ProgramSource::Replaced,
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

/// A larger file is not copied.
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
    fn a_program_that_is_built_again_is_found_as_it_was() {
        let files = Files::new();
        let copy = files.make().unwrap();
        assert_eq!(copy.source(&files.program()), ProgramSource::Original);
        // As builders do.
        fs::remove_file(files.program()).unwrap();
        assert_eq!(copy.source(&files.program()), ProgramSource::Copy(&files.copy()));
        files.write("\x7fELF new");
        assert_eq!(copy.source(&files.program()), ProgramSource::Copy(&files.copy()));
        assert_eq!(fs::read(files.copy()).unwrap(), b"\x7fELF old");
    }

    #[test]
    fn a_program_that_was_written_to_in_its_place_has_no_copy_any_more() {
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
