//! Wakes a waiting rank from another process on the host.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::OpenOptionsExt;
use std::process;

use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};

use super::memory::Address;

/// An anonymous pipe that every rank of the host can write to and one rank polls. It stays readable
/// until it is cleared.
///
/// Every process has both ends open, so notifying a rank that is gone is neither an error nor a
/// signal.
#[derive(Debug)]
pub(crate) struct PipeNotifier {
    pipe: File,
}

impl PipeNotifier {
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, _writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let pipe = open(format!("/proc/self/fd/{}", reader.as_raw_fd()))?;
        Ok(Self { pipe })
    }

    /// Opens the pipe of another process.
    pub(crate) fn open(address: &Address) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{}", address.process, address.descriptor);
        // Opening a different kind of file could have side effects.
        if !fs::read_link(&path)?.as_os_str().as_encoded_bytes().starts_with(LINK_START) {
            return Err(ErrorKind::NotFound.into());
        }
        let pipe = open(path)?;
        let found = pipe.metadata()?;
        if (found.st_dev(), found.st_ino()) != (address.device, address.inode) {
            return Err(ErrorKind::InvalidData.into());
        }
        Ok(Self { pipe })
    }

    /// Address of this pipe, valid as long as this process keeps it open.
    pub(crate) fn address(&self) -> io::Result<Address> {
        let file = self.pipe.metadata()?;
        Ok(Address {
            process: process::id(),
            descriptor: self.pipe.as_raw_fd().cast_unsigned(),
            device: file.st_dev(),
            inode: file.st_ino(),
        })
    }

    pub(crate) fn notify(&self) {
        // The write fails only if the pipe is full, and then it is readable already.
        let _ = rustix::io::write(&self.pipe, &[0]);
    }

    /// Resets the notification. The caller checks its wake-up conditions after this call, not
    /// before.
    pub(crate) fn clear(&self) {
        // The pipe holds about one byte for each time this rank has slept.
        let _ = rustix::io::read(&self.pipe, &mut [0; 64]);
    }
}

impl AsFd for PipeNotifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

fn open(path: String) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

const LINK_START: &[u8] = b"pipe:[";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notification_stays_until_it_is_cleared() {
        let mine = PipeNotifier::new().unwrap();
        let other = PipeNotifier::open(&mine.address().unwrap()).unwrap();
        let is_set = || rustix::io::ioctl_fionread(&mine.pipe).unwrap() > 0;
        assert!(!is_set());
        (0..100_000).for_each(|_| other.notify());
        assert!(is_set(), "a full pipe stays readable");
        while is_set() {
            mine.clear();
        }
        drop(mine);
        other.notify();
    }

    #[test]
    fn only_this_very_pipe_is_opened() {
        let notifier = PipeNotifier::new().unwrap();
        let address = notifier.address().unwrap();
        let another = Address { inode: address.inode + 1, ..address };
        let file = File::open("/dev/null").unwrap();
        let no_pipe = Address { descriptor: file.as_raw_fd().cast_unsigned(), ..address };
        for wrong in [another, no_pipe, Address { process: u32::MAX, ..address }] {
            assert!(PipeNotifier::open(&wrong).is_err(), "{wrong:?}");
        }
    }
}
