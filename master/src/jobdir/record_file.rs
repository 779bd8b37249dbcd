//! A file that can be replaced on a full disk.
//!
//! ```text
//!  record.json    the newest content, padded with spaces
//!  record.spare   the content before it: as many blocks, which are overwritten next
//! ```
//!
//! A write overwrites the spare, which takes no room of the disk, and exchanges the two names.
//! After a crash of the process, `record.json` is whole and the newest. A thread syncs it to the
//! disk; the spare is overwritten when that is done. So after a loss of power, one of the two is
//! whole.
//!
//! Where a file system can't exchange names, or the thread is still busy, the file is replaced by a
//! new one.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::files::replace;

/// The pair of files.
#[derive(Debug)]
pub(super) struct RecordFile {
    path: PathBuf,
    spare: PathBuf,
    /// Length of the contents with their padding.
    room: usize,
    /// Whether the file system exchanges names.
    exchanges: bool,
    /// Syncs the newest content.
    syncing: Option<JoinHandle<()>>,
}

impl RecordFile {
    /// The file at `path`, whose spare is at `spare`. Takes the room of the spare.
    pub(super) fn new(path: PathBuf, spare: PathBuf) -> Self {
        // A full disk does not hinder the first write, which reports it.
        let _ = reserve(&spare, ROOM_MIN);
        Self { path, spare, room: ROOM_MIN, exchanges: true, syncing: None }
    }

    /// Replaces the content, which is JSON or empty.
    ///
    /// # Errors
    /// An error of the operating system. The old content is unchanged, and [`is_stale`] if that
    /// can be noted.
    pub(super) fn write(&mut self, content: &[u8]) -> io::Result<()> {
        let room = content.len().saturating_mul(3) / 2;
        self.room = self.room.max(room.next_multiple_of(BLOCK));
        let mut padded = content.to_vec();
        padded.resize(self.room, b' ');
        let is_synced = self.syncing.as_ref().is_none_or(JoinHandle::is_finished);
        let written = if is_synced && self.exchanges {
            let exchanged = self.exchange(&padded);
            exchanged.or_else(|_| self.replace(&padded))
        } else {
            let replaced = self.replace(&padded);
            replaced.or_else(|_| self.exchange(&padded))
        };
        match written {
            Ok(file) => {
                let sync = move || drop(file.sync_data());
                // Without a thread, the system writes the content when it likes to.
                self.syncing = std::thread::Builder::new().name("record".into()).spawn(sync).ok();
                Ok(())
            }
            Err(error) => {
                self.mark_stale()?;
                Err(error)
            }
        }
    }

    /// Overwrites the spare and exchanges it with the file.
    fn exchange(&mut self, padded: &[u8]) -> io::Result<File> {
        let spare = open(&self.spare)?;
        spare.write_all_at(padded, 0)?;
        if self.path.exists() {
            let exchanged = renameat_with(CWD, &self.path, CWD, &self.spare, RenameFlags::EXCHANGE);
            self.exchanges = exchanged.is_ok();
            exchanged?;
        } else {
            fs::rename(&self.spare, &self.path)?;
            let _ = reserve(&self.spare, padded.len());
        }
        Ok(spare)
    }

    fn replace(&self, padded: &[u8]) -> io::Result<File> {
        replace(&self.path, padded)?;
        // It may bear the mark.
        let _ = reserve(&self.spare, padded.len());
        File::open(&self.path)
    }

    /// Notes that a newer content could not be written. Removes the file where that fails.
    fn mark_stale(&self) -> io::Result<()> {
        open(&self.spare)
            .and_then(|spare| spare.write_all_at(&[STALE], 0))
            .or_else(|_| fs::remove_file(&self.path))
    }
}

/// Whether a newer content than the one at the path could not be written.
pub(super) fn is_stale(spare: &Path) -> bool {
    let mut first = [0];
    let read = File::open(spare).and_then(|spare| spare.read_exact_at(&mut first, 0));
    read.is_ok() && first == [STALE]
}

/// Overwrites the file with spaces.
fn reserve(path: &Path, bytes: usize) -> io::Result<()> {
    open(path)?.write_all_at(&vec![b' '; bytes], 0)
}

fn open(path: &Path) -> io::Result<File> {
    File::options().write(true).create(true).truncate(false).mode(0o600).open(path)
}

const BLOCK: usize = 4096;
/// Room for the record of a small job at the end of its life.
const ROOM_MIN: usize = 64 << 10;
/// First byte of a spare whose file is not the newest content.
const STALE: u8 = b'!';

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let (path, spare) = (folder.path().join("record"), folder.path().join("spare"));
        (folder, path, spare)
    }

    fn content(path: &Path) -> String {
        fs::read_to_string(path).unwrap().trim_end().to_owned()
    }

    fn wait(file: &mut RecordFile) {
        if let Some(syncing) = file.syncing.take() {
            syncing.join().unwrap();
        }
    }

    #[test]
    fn the_newest_content_is_in_the_file_and_the_one_before_in_its_spare() {
        let (_folder, path, spare) = place();
        let mut file = RecordFile::new(path.clone(), spare.clone());
        assert_eq!(fs::metadata(&spare).unwrap().len(), ROOM_MIN as u64);
        for (newest, before) in [("{1}", ""), ("{2}", "{1}"), ("{3}", "{2}")] {
            file.write(newest.as_bytes()).unwrap();
            wait(&mut file);
            assert_eq!((content(&path), content(&spare)), (newest.into(), before.into()));
        }
        let long = "x".repeat(ROOM_MIN);
        file.write(long.as_bytes()).unwrap();
        assert_eq!((content(&path), content(&spare)), (long, "{3}".into()));
        assert!(!is_stale(&spare));
    }

    /// As on a full disk: a file that exists can be overwritten.
    #[test]
    fn a_write_creates_no_file_once_there_are_two() {
        let (folder, path, spare) = place();
        let mut file = RecordFile::new(path.clone(), spare);
        file.write(b"{1}").unwrap();
        wait(&mut file);
        let inodes = || {
            let files = fs::read_dir(folder.path()).unwrap().map(Result::unwrap);
            let mut inodes: Vec<u64> =
                files.map(|file| std::os::unix::fs::DirEntryExt::ino(&file)).collect();
            inodes.sort_unstable();
            inodes
        };
        let before = inodes();
        for i in 2..5 {
            file.write(format!("{{{i}}}").as_bytes()).unwrap();
            wait(&mut file);
            assert_eq!((inodes(), content(&path)), (before.clone(), format!("{{{i}}}")));
        }
    }

    #[test]
    fn content_that_cannot_be_written_leaves_the_old_one_known_as_stale() {
        let folder = tempfile::tempdir().unwrap();
        // A folder takes neither the name of a file in it, nor that of a file.
        let path = folder.path().join("record");
        let spare = path.join("spare");
        fs::create_dir(&path).unwrap();
        let mut file = RecordFile::new(path.clone(), spare.clone());
        assert!(!is_stale(&spare));
        file.write(b"{1}").unwrap_err();
        assert!(is_stale(&spare) && path.is_dir());
        file.path = path.join("file");
        file.write(b"{2}").unwrap();
        assert!(content(&file.path) == "{2}" && !is_stale(&spare));
    }

    #[test]
    fn old_content_that_cannot_be_marked_is_removed() {
        let (folder, _, spare) = place();
        // The file that would replace it has a longer name than there can be.
        let path = folder.path().join("r".repeat(250));
        fs::write(&path, "{1}").unwrap();
        std::os::unix::fs::symlink("/dev/full", &spare).unwrap();
        let mut file = RecordFile::new(path.clone(), spare);
        file.write(b"{2}").unwrap_err();
        assert!(!path.exists());
    }
}
