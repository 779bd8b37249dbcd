//! Where the GPU of a rank is.

use std::hash::{DefaultHasher, Hasher};
use std::sync::OnceLock;

use crate::device::Device;

/// Where a GPU is, as NCCL sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Place {
    /// Digest of what NCCL takes for the host's name.
    pub(super) host: u64,
    pub(super) pci: [i32; 3],
}

impl Place {
    pub(super) fn of(device: &Device) -> Self {
        static HOST: OnceLock<u64> = OnceLock::new();
        let host = *HOST.get_or_init(|| {
            let name = std::env::var("NCCL_HOSTID").unwrap_or_else(|_| {
                let read = |file| std::fs::read_to_string(file).unwrap_or_default();
                read("/proc/sys/kernel/hostname") + &read("/proc/sys/kernel/random/boot_id")
            });
            let mut digest = DefaultHasher::new();
            digest.write(name.as_bytes());
            digest.finish()
        });
        Self { host, pci: device.pci() }
    }

    pub(super) fn encode(self) -> [u8; PLACE_BYTES] {
        let mut bytes = [0; PLACE_BYTES];
        bytes[..8].copy_from_slice(&self.host.to_le_bytes());
        for (part, place) in self.pci.iter().zip(bytes[8..].chunks_mut(4)) {
            place.copy_from_slice(&part.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; PLACE_BYTES]) -> Self {
        let [host_low, host_high, domain, bus, place] = std::array::from_fn(|at| {
            i32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[4 * at + byte]))
        });
        let host = u64::from(host_low.cast_unsigned()) | u64::from(host_high.cast_unsigned()) << 32;
        Self { host, pci: [domain, bus, place] }
    }
}

/// Length of an encoded place.
pub(super) const PLACE_BYTES: usize = size_of::<u64>() + 3 * size_of::<i32>();
