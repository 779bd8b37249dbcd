//! Where the GPU of a rank is.

use std::sync::OnceLock;

use sha2::{Digest, Sha256};

use crate::device::Device;

/// Where a GPU is, as NCCL sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Place {
    /// Digest of what NCCL takes for the host's name. Workers of different builds compare it.
    pub(super) host: u64,
    /// Domain, bus and device on the PCI bus.
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
            digest_of(&name)
        });
        Self { host, pci: device.pci() }
    }

    pub(super) fn encode(self) -> [u8; PLACE_BYTES] {
        let mut bytes = [0; PLACE_BYTES];
        bytes[..8].copy_from_slice(&self.host.to_le_bytes());
        for (number, part) in self.pci.iter().zip(bytes[8..].chunks_mut(4)) {
            part.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; PLACE_BYTES]) -> Self {
        let [host_low, host_high, domain, bus, device] = std::array::from_fn(|at| {
            i32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[4 * at + byte]))
        });
        let host = u64::from(host_low.cast_unsigned()) | u64::from(host_high.cast_unsigned()) << 32;
        Self { host, pci: [domain, bus, device] }
    }
}

fn digest_of(host: &str) -> u64 {
    let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = Sha256::digest(host.as_bytes()).into();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Length of an encoded place.
pub(super) const PLACE_BYTES: usize = size_of::<u64>() + 3 * size_of::<i32>();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_of_a_host_is_the_same_in_all_builds() {
        // SHA-256 of the empty text begins with e3b0c44298fc1c14.
        assert_eq!(digest_of(""), 0x141c_fc98_42c4_b0e3);
        assert_ne!(digest_of("one"), digest_of("two"));
    }
}
