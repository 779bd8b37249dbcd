//! A short measurement of this host, for the master: memory, GPUs, and the disks of the folders
//! that the worker writes to.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use elasticdl_proto::{DiskReport, HostReport};
use rustix::fs::{Mode, OFlags, open, statvfs};

/// Measures this host for some tenths of a second, with one thread.
pub(crate) fn measure<'a>(folders: impl IntoIterator<Item = &'a Path>) -> HostReport {
    let device = |gpu: &u32| Path::new(&format!("/dev/nvidia{gpu}")).exists();
    let gpus = (0..GPUS_MAX).filter(device).count() as u32;
    let disks = folders.into_iter().filter_map(disk).collect();
    HostReport { copied_per_s: copied_per_s(), gpus, disks }
}

/// The best of several copies: the first one maps the memory, and what else runs here takes its
/// part of others.
fn copied_per_s() -> u64 {
    let (from, mut to) = (vec![1_u8; COPY_BYTES], vec![0_u8; COPY_BYTES]);
    let (began, mut best) = (Instant::now(), Duration::MAX);
    for copies in 0.. {
        let at = Instant::now();
        if copies >= COPIES_MIN && at - began > COPY_TIME {
            break;
        }
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
        best = best.min(at.elapsed());
    }
    per_s(COPY_BYTES, best)
}

/// `None` if the file system does not say how much is free.
fn disk(folder: &Path) -> Option<DiskReport> {
    let place = folder.ancestors().find(|folder| folder.is_dir())?;
    let found = statvfs(place).ok()?;
    Some(DiskReport {
        folder: folder.display().to_string(),
        free_bytes: found.f_bavail.saturating_mul(found.f_frsize),
        written_per_s: written_per_s(place).ok(),
    })
}

/// Writes a file without a name, of which nothing is left, however this process ends.
fn written_per_s(folder: &Path) -> io::Result<u64> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let mut file = File::from(open(folder, flags, Mode::RUSR | Mode::WUSR)?);
    let bytes = vec![1; WRITE_BYTES];
    let began = Instant::now();
    file.write_all(&bytes)?;
    file.sync_data()?;
    Ok(per_s(WRITE_BYTES, began.elapsed()))
}

fn per_s(bytes: usize, time: Duration) -> u64 {
    (bytes as f64 / time.as_secs_f64().max(1e-9)) as u64
}

/// More than the caches that a core has for itself.
const COPY_BYTES: usize = 16 << 20;
const COPY_TIME: Duration = Duration::from_millis(60);
const COPIES_MIN: u32 = 4;
const WRITE_BYTES: usize = 4 << 20;
const GPUS_MAX: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_disks_are_measured_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let later = folder.path().join("not/there/yet");
        let HostReport { copied_per_s, disks, .. } = measure([folder.path(), &later]);
        // From 16 MB/s, of an emulated machine, to 16 TB/s.
        assert!((16 << 20..16 << 40).contains(&copied_per_s), "{copied_per_s}");
        assert_eq!(
            disks.iter().map(|disk| Path::new(&disk.folder)).collect::<Vec<_>>(),
            [folder.path(), &later]
        );
        for DiskReport { free_bytes, written_per_s, .. } in &disks {
            assert!(*free_bytes > 0 && written_per_s.is_none_or(|speed| speed > 0), "{disks:?}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert_eq!(written_per_s(&later).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
