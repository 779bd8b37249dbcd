//! The lock of the directory of a job, which its running master holds.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use super::error::JobDirError;
use super::files::LOCK;
use super::lookup::look_up;

pub(super) fn take_lock(root: &Path) -> Result<File, JobDirError> {
    let path = root.join(LOCK);
    let options = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).clone();
    let file =
        options.open(&path).map_err(|source| JobDirError::Create { path: root.into(), source })?;
    let mut attempts = LOCK_ATTEMPTS;
    loop {
        attempts -= 1;
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(source)) => return Err(JobDirError::Write { path, source }),
            Err(TryLockError::WouldBlock) if attempts == 0 => return Err(running(root)),
            // Another command may be checking whether a master runs.
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
        }
    }
}

pub(super) fn running(root: &Path) -> JobDirError {
    let pid = look_up(root).ok().map(|(endpoint, _)| endpoint.pid);
    JobDirError::Running { path: root.into(), pid }
}

const LOCK_ATTEMPTS: u32 = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(10);
