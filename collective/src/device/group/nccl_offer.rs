//! Agreement on NCCL: the offer of each rank, and the decision, which is the same on all ranks.

use super::NcclPolicy;
use super::place::{PLACE_BYTES, Place};
use crate::device::Device;

/// Offer of one rank.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum NcclOffer {
    /// The rank does not use NCCL, for this reason.
    Off(String),
    On {
        version: i32,
        uuid: [u8; 16],
        place: Place,
        /// Whether the rank uses NCCL even if another rank has the same GPU.
        on_shared_gpus: bool,
    },
}

impl NcclOffer {
    pub(super) fn of(policy: &NcclPolicy, device: &Device) -> Self {
        match policy {
            NcclPolicy::Off(reason) => Self::Off(reason.clone()),
            NcclPolicy::On(library, options) => Self::On {
                version: library.version(),
                uuid: device.uuid(),
                place: Place::of(device),
                on_shared_gpus: options.on_shared_gpus,
            },
        }
    }

    /// `0 | reason` or `1 | version | UUID | host | PCI | shared`. Numbers are little endian: the
    /// version and the three of the PCI position are i32, the host is u64.
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Off(reason) => {
                let end = reason.floor_char_boundary(REASON_BYTES_MAX);
                [&[0], &reason.as_bytes()[..end]].concat()
            }
            Self::On { version, uuid, place, on_shared_gpus } => {
                let shared = [u8::from(*on_shared_gpus)];
                [&[1][..], &version.to_le_bytes(), uuid, &place.encode(), &shared].concat()
            }
        }
    }

    /// Decodes an offer. Invalid bytes decode to `Off`.
    pub(super) fn decode(bytes: &[u8]) -> Self {
        match bytes {
            [0, reason @ ..] if reason.len() <= REASON_BYTES_MAX => {
                Self::Off(String::from_utf8_lossy(reason).into_owned())
            }
            [1, rest @ ..] if rest.len() == ON_BYTES => {
                let (version, rest) =
                    rest.split_first_chunk().expect("the length was just checked");
                let (uuid, rest) = rest.split_first_chunk().expect("the length was just checked");
                let (place, shared) =
                    rest.split_first_chunk().expect("the length was just checked");
                Self::On {
                    version: i32::from_le_bytes(*version),
                    uuid: *uuid,
                    place: Place::decode(place),
                    on_shared_gpus: shared == [1],
                }
            }
            _ => Self::Off("its offer can't be decoded".to_owned()),
        }
    }
}

/// Returns an error with the reason if the group continues without NCCL.
pub(super) fn agree(offers: &[NcclOffer]) -> Result<(), String> {
    let mut seen: Vec<(i32, [u8; 16], Place)> = Vec::new();
    for (rank, offer) in offers.iter().enumerate() {
        let NcclOffer::On { version, uuid, place, on_shared_gpus } = offer else {
            let NcclOffer::Off(reason) = offer else { continue };
            return Err(format!("rank {rank}: {reason}"));
        };
        if let Some((first, ..)) = seen.first()
            && first != version
        {
            return Err(format!("rank 0 has version {first}, rank {rank} has {version}"));
        }
        if !on_shared_gpus {
            if let Some(other) = seen.iter().position(|(_, other, _)| other == uuid) {
                return Err(format!("ranks {other} and {rank} share a GPU"));
            }
            if *version < COMPARES_UUIDS
                && let Some(other) = seen.iter().position(|(.., other)| other == place)
            {
                return Err(format!(
                    "ranks {other} and {rank} have instances of one GPU, which NCCL before 2.30 \
                     takes for the same GPU"
                ));
            }
        }
        seen.push((*version, *uuid, *place));
    }
    Ok(())
}

const REASON_BYTES_MAX: usize = 500;
const ON_BYTES: usize = size_of::<i32>() + 16 + PLACE_BYTES + 1;
/// First version that tells instances of a GPU (MIG) apart.
const COMPARES_UUIDS: i32 = 23_000;

#[cfg(test)]
mod tests {
    use super::*;

    const ON: NcclOffer = on(22_809, 1);

    /// An offer with a GPU of its own.
    const fn on(version: i32, gpu: u8) -> NcclOffer {
        let place = Place { host: u64::MAX - 1, pci: [0, gpu as i32, -1] };
        NcclOffer::On { version, uuid: [gpu; 16], place, on_shared_gpus: false }
    }

    #[test]
    fn an_offer_survives_the_wire() {
        let long = "ü".repeat(REASON_BYTES_MAX);
        for offer in
            [ON, NcclOffer::Off(String::new()), NcclOffer::Off("no libnccl.so.2".to_owned())]
        {
            assert_eq!(NcclOffer::decode(&offer.encode()), offer);
        }
        let NcclOffer::Off(cut) = NcclOffer::decode(&NcclOffer::Off(long.clone()).encode()) else {
            panic!("the offer is off")
        };
        assert!(long.starts_with(&cut) && cut.len() == REASON_BYTES_MAX);
        for bytes in [&[][..], &[1], &[2], &[1; 41], &[1; 43], &vec![0; REASON_BYTES_MAX + 2]] {
            let NcclOffer::Off(reason) = NcclOffer::decode(bytes) else { panic!("{bytes:?}") };
            assert!(reason.contains("can't be decoded"), "{reason}");
        }
    }

    #[test]
    fn an_unwilling_rank_a_version_mismatch_or_a_shared_gpu_disables_nccl() {
        let shared = |gpu| match on(22_809, gpu) {
            NcclOffer::On { version, uuid, place, .. } => {
                NcclOffer::On { version, uuid, place, on_shared_gpus: true }
            }
            off => off,
        };
        assert_eq!(agree(&[ON]), Ok(()));
        assert_eq!(agree(&[ON, on(22_809, 2)]), Ok(()));
        let error = |offers: &[NcclOffer]| agree(offers).expect_err("the ranks do not agree");
        assert_eq!(
            error(&[ON, on(22_809, 2), NcclOffer::Off("no library".to_owned())]),
            "rank 2: no library"
        );
        assert_eq!(error(&[ON, on(21_903, 2)]), "rank 0 has version 22809, rank 1 has 21903");
        assert_eq!(error(&[on(22_809, 2), ON, ON]), "ranks 1 and 2 share a GPU");
        assert_eq!(agree(&[shared(1), shared(1)]), Ok(()));
        let instance = |version, host, uuid| {
            let place = Place { host, pci: [0, 3, 0] };
            NcclOffer::On { version, uuid: [uuid; 16], place, on_shared_gpus: false }
        };
        assert_eq!(
            error(&[instance(22_907, 5, 1), instance(22_907, 5, 2)]),
            "ranks 0 and 1 have instances of one GPU, which NCCL before 2.30 takes for the same GPU"
        );
        assert_eq!(agree(&[instance(22_907, 5, 1), instance(22_907, 6, 2)]), Ok(()));
        assert_eq!(agree(&[instance(23_001, 5, 1), instance(23_001, 5, 2)]), Ok(()));
    }
}
