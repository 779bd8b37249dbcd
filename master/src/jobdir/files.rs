//! Names of the files of a job, and how they are written.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, OFlags};
use serde_json::Value;

/// Atomically replaces `path` with `bytes`, readable by its owner only. A reader, also after a
/// crash, sees either the old file or the new one.
///
/// # Errors
/// An error of the operating system; the old file is unchanged.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_and_rename(path, bytes, File::sync_all)
}

/// Like [`write_atomically`], but a crash of the machine may lose the new file or its content.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_and_rename(path, bytes, |_| Ok(()))
}

fn write_and_rename(
    path: &Path,
    bytes: &[u8],
    sync: impl Fn(&File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = temporary_beside(path)?;
    let written = create_new(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        sync(&file)
    });
    written.and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        // The file may not have been created at all.
        let _ = fs::remove_file(&temporary);
    })
}

/// Writes an output to a path that a user gives: as [`write_atomically`], but a device or a pipe is
/// written to, not replaced, and so is the file that a link leads to.
///
/// # Errors
/// An error of the operating system; a file is unchanged.
pub fn write_output(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if !is_device(path) {
        let linked = path.is_symlink().then(|| path.canonicalize().ok()).flatten();
        return write_atomically(linked.as_deref().unwrap_or(path), bytes);
    }
    // Opening a pipe without a reader would wait for ever.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let mut device = OpenOptions::new().append(true).custom_flags(flags).open(path)?;
    rustix::fs::fcntl_setfl(&device, OFlags::APPEND)?;
    device.write_all(bytes)
}

/// Writes the summary of a job that has ended to `path` in its directory: on a full disk, in the
/// place of the record's spare, which is needed no more.
///
/// # Errors
/// As for [`write_output`].
pub fn write_summary(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_output(path, bytes).or_else(|error| {
        let spare = path.with_file_name(SPARE);
        let in_spare = || {
            let file = OpenOptions::new().write(true).open(&spare)?;
            // A spare that is too short would take room of the disk.
            if file.metadata()?.len() < bytes.len() as u64 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            file.write_all_at(bytes, 0)?;
            file.set_len(bytes.len() as u64)?;
            file.sync_all()?;
            fs::rename(&spare, path)
        };
        in_spare().map_err(|_: io::Error| error)
    })
}

/// Whether `path` is something that no file may replace.
fn is_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir())
        || (["/dev", "/proc"].iter().any(|system| path.starts_with(system))
            && !path.starts_with("/dev/shm"))
}

/// Checks that `write_output` would succeed for `path` now. Leaves no file behind.
///
/// # Errors
/// Why it would fail.
pub fn check_writable(path: &Path) -> io::Result<()> {
    if is_device(path) {
        let kind = path.metadata()?.file_type();
        if kind.is_block_device() || kind.is_socket() {
            let text = "it is a disk or a socket; name a file";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        return Ok(rustix::fs::access(path, Access::WRITE_OK)?);
    }
    if path.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
    }
    let temporary = temporary_beside(path)?;
    create_new(&temporary)?;
    fs::remove_file(&temporary)
}

/// Whether there is a file at `path`, with content, that is no summary of a job.
#[must_use]
pub fn is_another_file(path: &Path) -> bool {
    let Ok(found) = path.metadata() else { return false };
    if !found.is_file() || found.len() == 0 {
        return false;
    }
    let text =
        if found.len() > SUMMARY_MAX { Vec::new() } else { fs::read(path).unwrap_or_default() };
    // Another release may have written it.
    let summary: Value = serde_json::from_slice(&text).unwrap_or_default();
    !["job", "state", "records"].iter().all(|key| summary.get(key).is_some())
}

fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Returns a random name in the same directory, so that a rename is atomic. Process ids are not
/// unique where several containers share a folder.
fn temporary_beside(path: &Path) -> io::Result<PathBuf> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    let mut hidden = OsString::from(".");
    hidden.push(name);
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    hidden.push(format!(".{:016x}.tmp", u64::from_ne_bytes(random)));
    Ok(path.with_file_name(hidden))
}

/// Quotes a path for a shell, if necessary.
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@%,".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

pub(super) const CA: &str = "ca.crt";
pub(super) const CERTIFICATE: &str = "master.crt";
pub(super) const KEY: &str = "master.key";
/// Folder of the checkpoints of a job without another location for them.
pub const CHECKPOINTS: &str = "checkpoints";
/// Folder of the files of the job that a new one replaces, and while they are moved.
pub(super) const EARLIER: &str = "earlier";
pub(super) const MOVING: &str = ".earlier";
pub(super) const FILES: &str = "files.zst";
pub(super) const HISTORY: &str = "history.json";
pub(super) const JOB: &str = "job.json";
pub(super) const LOCK: &str = "lock";
pub(super) const LOGS: &str = "logs";
pub(super) const MASTER: &str = "master.json";
pub(super) const MASTER_LOG: &str = "master.log";
/// Models that their own places did not take.
pub(super) const EXPORTS: [&str; 2] = ["best.safetensors", "model.safetensors"];
pub(super) const PROCESSES: &str = "processes";
pub(super) const PROGRAM: &str = "program";
pub(super) const RECORD: &str = "record.json";
/// The record before the newest one; see `record_file`.
pub(super) const SPARE: &str = "record.spare";
/// Folder of the files of the newest job that could not start.
pub(super) const REFUSED: &str = "refused";
pub(super) const SUMMARY: &str = "summary.json";
pub(super) const TOKEN: &str = "token";

/// More than the summary of the largest job has.
const SUMMARY_MAX: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_that_the_disk_does_not_take_is_in_the_place_of_the_spare() {
        let folder = tempfile::tempdir().unwrap();
        // Its temporary file would have a longer name than there can be.
        let path = folder.path().join("s".repeat(250));
        let spare = folder.path().join(SPARE);
        fs::write(&spare, "!").unwrap();
        write_summary(&path, b"{}").unwrap_err();
        assert_eq!(fs::read(&spare).unwrap(), b"!", "it is too short");
        fs::write(&spare, " ".repeat(100)).unwrap();
        write_summary(&path, b"{}").unwrap();
        assert_eq!((fs::read(&path).unwrap(), spare.exists()), (b"{}".to_vec(), false));
    }
}
