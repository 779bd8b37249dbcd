//! Memory shared by processes on one host.
//!
//! It is an anonymous file (memfd) that all ranks map. It has no name, so nothing is left of it
//! when the last process that maps it ends, in whatever way. Its size is sealed, so no access can
//! fail.

#![allow(
    unsafe_code,
    reason = "other processes write to the memory, which the language does not model"
)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::{process, slice};

use rustix::fs::{MemfdFlags, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A readable and writable mapping of an anonymous file.
///
/// **Invariant:** every process that maps the memory follows the [protocol](super): data written by
/// one process is neither read nor written by another one until the writer has published it by
/// incrementing an atomic counter. Counters and data do not overlap.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    len: usize,
    backing: Backing,
}

/// Backing of the memory.
#[derive(Debug)]
enum Backing {
    File(File),
    /// Heap memory of this process, shared by its threads as processes share a file.
    #[cfg(test)]
    Heap {
        _until_dropped: std::sync::Arc<Heap>,
    },
}

impl Backing {
    fn file(&self) -> Option<&File> {
        match self {
            Self::File(file) => Some(file),
            #[cfg(test)]
            Self::Heap { .. } => None,
        }
    }
}

/// Address of a memory, for processes in the same PID namespace. A file found there is accepted
/// only if it has this device and inode.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Address {
    pub(crate) process: u32,
    pub(crate) descriptor: u32,
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

impl Address {
    pub(crate) fn encode(&self) -> [u8; ADDRESS_BYTES] {
        let mut bytes = [0; ADDRESS_BYTES];
        bytes[..4].copy_from_slice(&self.process.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.descriptor.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.device.to_le_bytes());
        bytes[16..].copy_from_slice(&self.inode.to_le_bytes());
        bytes
    }

    /// Decodes the address at the start of `bytes`, and returns it with the remaining bytes; `None`
    /// if they are too short.
    pub(crate) fn split(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (address, rest) = bytes.split_first_chunk::<ADDRESS_BYTES>()?;
        let short = |at: usize| address[at..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let long = |at: usize| address[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let found =
            Self { process: short(0)?, descriptor: short(4)?, device: long(8)?, inode: long(16)? };
        Some((found, rest))
    }
}

// SAFETY: the mapping belongs to the process, not to a thread. Accesses through `&self` are either
// atomic or, by the invariant, not concurrent.
unsafe impl Send for Memory {}

impl Memory {
    /// Creates memory of `len` zeros.
    pub(crate) fn create(len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // A strict kernel refuses memory that could be executable; an old one does not know the
        // flag.
        let file = memfd_create(NAME, flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| memfd_create(NAME, flags))?;
        let file = File::from(file);
        file.set_len(len as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        Self::map(file, len)
    }

    /// Opens the memory of another process, which must have length `len`.
    pub(crate) fn open(address: &Address, len: usize) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{}", address.process, address.descriptor);
        // Opening a different kind of file could have side effects.
        if !fs::read_link(&path)?.as_os_str().as_encoded_bytes().starts_with(LINK_START) {
            return Err(ErrorKind::NotFound.into());
        }
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        let found = file.metadata()?;
        let is_same_file = (found.st_dev(), found.st_ino()) == (address.device, address.inode);
        if !is_same_file || found.len() != len as u64 || !fcntl_get_seals(&file)?.contains(SEALS) {
            return Err(ErrorKind::InvalidData.into());
        }
        Self::map(file, len)
    }

    /// Address of this memory, valid as long as this process keeps it open.
    pub(crate) fn address(&self) -> io::Result<Address> {
        let Some(file) = self.backing.file() else { return Err(ErrorKind::Unsupported.into()) };
        let descriptor = file.as_raw_fd().cast_unsigned();
        let file = file.metadata()?;
        Ok(Address {
            process: process::id(),
            descriptor,
            device: file.st_dev(),
            inode: file.st_ino(),
        })
    }

    fn map(file: File, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping, at an address chosen by the kernel, does not affect existing
        // memory.
        let base = unsafe {
            mmap(
                null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, backing: Backing::File(file) })
    }

    pub(crate) fn word32(&self, offset: usize) -> &AtomicU32 {
        self.check(offset, size_of::<AtomicU32>());
        assert!(offset.is_multiple_of(align_of::<AtomicU32>()), "offset {offset}");
        // SAFETY: the word lies within the mapping, which is page-aligned and lives as long as
        // `self`. All bit patterns are valid, and by the invariant other processes access it
        // atomically.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    pub(crate) fn word64(&self, offset: usize) -> &AtomicU64 {
        self.check(offset, size_of::<AtomicU64>());
        assert!(offset.is_multiple_of(align_of::<AtomicU64>()), "offset {offset}");
        // SAFETY: as in `word32`.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: the target lies within the mapping, `bytes` is not part of it, and by the
        // invariant no other process uses the target now.
        unsafe {
            self.base.as_ptr().add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }

    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(self.bytes(offset, bytes.len()));
    }

    /// Appends `len` bytes at `offset` to `bytes`.
    pub(crate) fn append(&self, offset: usize, len: usize, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self.bytes(offset, len));
    }

    /// Returns the floats at `offset`. The slice is valid only until the owner overwrites it, so
    /// callers use it immediately.
    pub(crate) fn floats(&self, offset: usize, len: usize) -> &[f32] {
        bytemuck::cast_slice(self.bytes(offset, len * size_of::<f32>()))
    }

    fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        self.check(offset, len);
        // SAFETY: the range lies within the mapping, all bit patterns are valid, and by the
        // invariant no process writes there now.
        unsafe { slice::from_raw_parts(self.base.as_ptr().add(offset), len) }
    }

    fn check(&self, offset: usize, len: usize) {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len), "{len} bytes at {offset} of {}", self.len);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match &self.backing {
            Backing::File(_) => {
                // SAFETY: the range is this mapping, and no reference into it outlives `self`.
                // Unmapping an existing mapping cannot fail.
                let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
            }
            #[cfg(test)]
            Backing::Heap { .. } => {}
        }
    }
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

const ADDRESS_BYTES: usize = 24;

const NAME: &str = "elasticdl";

const LINK_START: &[u8] = b"/memfd:elasticdl";

/// Memory shared by threads, freed with the last reference.
#[cfg(test)]
#[derive(Debug)]
struct Heap {
    base: NonNull<u8>,
    layout: std::alloc::Layout,
}

#[cfg(test)]
impl Memory {
    /// Creates the same zeros for `threads` threads. Miri and thread sanitizers can check heap
    /// memory; to them, two mappings of one file are different memory.
    pub(crate) fn of_threads(len: usize, threads: usize) -> Vec<Self> {
        let layout = std::alloc::Layout::from_size_align(len, 4096).unwrap();
        // SAFETY: the memory of a group is never empty.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
        let heap = std::sync::Arc::new(Heap { base, layout });
        (0..threads)
            .map(|_| Self { base, len, backing: Backing::Heap { _until_dropped: heap.clone() } })
            .collect()
    }
}

// SAFETY: the only operation on it is freeing it.
#[cfg(test)]
unsafe impl Send for Heap {}

// SAFETY: as for `Send`.
#[cfg(test)]
unsafe impl Sync for Heap {}

#[cfg(test)]
impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout, and the last user is gone.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_written_by_one_mapping_is_read_by_another() {
        let mine = Memory::create(8192).unwrap();
        let other = Memory::open(&mine.address().unwrap(), 8192).unwrap();
        mine.write(100, bytemuck::cast_slice(&[1.5_f32, 2.5]));
        assert_eq!(other.floats(100, 2), [1.5, 2.5]);
        let mut bytes = [0; 4];
        other.read(104, &mut bytes);
        assert_eq!(bytes, 2.5_f32.to_le_bytes());
        drop(mine);
        assert_eq!(other.floats(100, 1), [1.5], "the memory lives as long as one mapping");
    }

    #[test]
    fn only_this_very_file_is_opened() {
        let memory = Memory::create(4096).unwrap();
        let other = Memory::create(4096).unwrap();
        let address = memory.address().unwrap();
        assert_eq!(Address::split(&address.encode()), Some((address, &[][..])));
        assert_eq!(Address::split(&[]), None);
        let stdin = Address { descriptor: 0, ..address };
        let gone = Address { process: u32::MAX, ..address };
        let another = Address { inode: other.address().unwrap().inode, ..address };
        for wrong in [stdin, gone, another] {
            assert!(Memory::open(&wrong, 4096).is_err(), "{wrong:?}");
        }
        assert!(Memory::open(&address, 8192).is_err());
        let Backing::File(file) = &memory.backing else { panic!("it is backed by a file") };
        file.set_len(100).unwrap_err();
        file.set_len(10_000).unwrap_err();
    }

    #[test]
    #[should_panic(expected = "4 bytes at 4093 of 4096")]
    fn an_access_out_of_bounds_panics() {
        Memory::create(4096).unwrap().write(4093, &[0; 4]);
    }
}
