//! What the host of a worker offers, as the worker has measured it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A measurement of a host. The names of its fields are a public format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostReport {
    /// Bytes of memory that a thread copies per second.
    pub copied_per_s: u64,
    /// NVIDIA GPUs that a worker there has access to.
    pub gpus: u32,
    /// Folders that the worker writes to.
    pub disks: Vec<DiskReport>,
}

/// A measurement of a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskReport {
    /// Path of the folder.
    pub folder: String,
    /// Bytes that this user can write there.
    pub free_bytes: u64,
    /// Bytes per second that reach the disk; `None` where files need a name, as on NFS, or if none
    /// could be written.
    pub written_per_s: Option<u64>,
}

impl fmt::Display for HostReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { copied_per_s, gpus, disks } = self;
        let plural = if *gpus == 1 { "" } else { "s" };
        write!(f, "copies {} GB/s in memory, {gpus} GPU{plural}", giga(*copied_per_s))?;
        for DiskReport { folder, free_bytes, written_per_s } in disks {
            write!(f, ", {folder} has {} GB free", giga(*free_bytes))?;
            if let Some(speed) = written_per_s {
                write!(f, " and takes {} GB/s", giga(*speed))?;
            }
        }
        Ok(())
    }
}

/// In thousands of millions.
fn giga(bytes: u64) -> String {
    let digits = if bytes < 1_000_000_000 { 3 } else { 1 };
    format!("{:.digits$}", bytes as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_one_line() {
        let disk = |folder: &str, free_bytes, written_per_s| DiskReport {
            folder: folder.into(),
            free_bytes,
            written_per_s,
        };
        let disks = vec![disk("/tmp", 12_340_000_000, Some(90_000_000)), disk("/nfs", 0, None)];
        let report = HostReport { copied_per_s: 9_750_000_000, gpus: 1, disks };
        let expected = "copies 9.8 GB/s in memory, 1 GPU, /tmp has 12.3 GB free and takes 0.090 \
                        GB/s, /nfs has 0.000 GB free";
        assert_eq!(report.to_string(), expected);
    }
}
