//! Agreement on NCCL: the offer of each rank, and the decision, which is the same on all ranks.

use super::NcclPolicy;

/// Offer of one rank.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum NcclOffer {
    /// The rank does not use NCCL, for this reason.
    Off(String),
    On {
        version: i32,
        uuid: [u8; 16],
        /// Whether the rank uses NCCL even if another rank has the same GPU.
        on_shared_gpus: bool,
    },
}

impl NcclOffer {
    pub(super) fn of(policy: &NcclPolicy, uuid: [u8; 16]) -> Self {
        match policy {
            NcclPolicy::Off(reason) => Self::Off(reason.clone()),
            NcclPolicy::On(library, options) => Self::On {
                version: library.version(),
                uuid,
                on_shared_gpus: options.on_shared_gpus,
            },
        }
    }

    /// `0 | reason` or `1 | version (i32, little endian) | UUID | shared`
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Off(reason) => {
                let mut end = reason.len().min(REASON_BYTES_MAX);
                while !reason.is_char_boundary(end) {
                    end -= 1;
                }
                [&[0], &reason.as_bytes()[..end]].concat()
            }
            Self::On { version, uuid, on_shared_gpus } => {
                [&[1][..], &version.to_le_bytes(), uuid, &[u8::from(*on_shared_gpus)]].concat()
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
                let (uuid, shared) = rest.split_first_chunk().expect("the length was just checked");
                Self::On {
                    version: i32::from_le_bytes(*version),
                    uuid: *uuid,
                    on_shared_gpus: shared == [1],
                }
            }
            _ => Self::Off("its offer can't be decoded".to_owned()),
        }
    }
}

/// Returns an error with the reason if the group continues without NCCL.
pub(super) fn agree(offers: &[NcclOffer]) -> Result<(), String> {
    let mut seen: Vec<(i32, [u8; 16])> = Vec::new();
    for (rank, offer) in offers.iter().enumerate() {
        let NcclOffer::On { version, uuid, on_shared_gpus } = offer else {
            let NcclOffer::Off(reason) = offer else { continue };
            return Err(format!("rank {rank}: {reason}"));
        };
        if let Some((first, _)) = seen.first()
            && first != version
        {
            return Err(format!("rank 0 has version {first}, rank {rank} has {version}"));
        }
        if !on_shared_gpus && let Some(other) = seen.iter().position(|(_, other)| other == uuid) {
            return Err(format!("ranks {other} and {rank} share a GPU"));
        }
        seen.push((*version, *uuid));
    }
    Ok(())
}

const REASON_BYTES_MAX: usize = 500;
const ON_BYTES: usize = size_of::<i32>() + 16 + 1;

#[cfg(test)]
mod tests {
    use super::*;

    const ON: NcclOffer = NcclOffer::On { version: 22_809, uuid: [1; 16], on_shared_gpus: false };

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
        for bytes in [&[][..], &[1], &[2], &[1; 21], &[1; 23], &vec![0; REASON_BYTES_MAX + 2]] {
            let NcclOffer::Off(reason) = NcclOffer::decode(bytes) else { panic!("{bytes:?}") };
            assert!(reason.contains("can't be decoded"), "{reason}");
        }
    }

    #[test]
    fn an_unwilling_rank_a_version_mismatch_or_a_shared_gpu_disables_nccl() {
        let other =
            |version, uuid| NcclOffer::On { version, uuid: [uuid; 16], on_shared_gpus: false };
        let shared =
            |uuid| NcclOffer::On { version: 22_809, uuid: [uuid; 16], on_shared_gpus: true };
        assert_eq!(agree(&[ON]), Ok(()));
        assert_eq!(agree(&[ON, other(22_809, 2)]), Ok(()));
        let error = |offers: &[NcclOffer]| agree(offers).expect_err("the ranks do not agree");
        assert_eq!(
            error(&[ON, other(22_809, 2), NcclOffer::Off("no library".to_owned())]),
            "rank 2: no library"
        );
        assert_eq!(error(&[ON, other(21_803, 2)]), "rank 0 has version 22809, rank 1 has 21803");
        assert_eq!(error(&[other(22_809, 2), ON, ON]), "ranks 1 and 2 share a GPU");
        assert_eq!(agree(&[shared(1), shared(1)]), Ok(()));
    }
}
