//! Handshake: the first bytes on every link. They name the two workers and the generation, and
//! prove that the dialling worker belongs to the job. Pure.
//!
//! ```text
//! purpose  job (SHA-256 of its name)  generation  from   to  proof (HMAC-SHA256 of the fields)
//! 8 bytes                   32 bytes         u64   u64  u64                        32 bytes
//! ```
//!
//! **Invariant:** the secret is never sent, and no field after the purpose is used before the proof
//! is verified.
//!
//! The proof keeps unauthenticated peers out. It does not protect the bytes that follow from an
//! attacker who can read or modify the network's traffic. A recorded hello is valid neither in
//! another generation nor for another worker.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::Secret;

/// First message of the worker that dials.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    pub(crate) job: JobDigest,
    pub(crate) generation: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// Purpose of a link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// Link of the ring of the ranks on one host, in a group on several hosts.
    Host,
    /// Link of the ring of the hosts' leaders.
    Leaders,
    /// Link of the ring of a generation.
    Ring,
    /// Link for a state transfer, independent of the generation.
    State,
    /// Additional link between the same members as [`Ring`](Self::Ring), with its number from 1.
    Channel(u8),
}

/// Digest of the job's name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct JobDigest([u8; 32]);

/// Why the bytes are not a valid hello for this worker.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum HelloError {
    #[error("the hello names another job")]
    AnotherJob,
    #[error("the hello is for worker {0}")]
    AnotherWorker(u64),
    #[error("not a hello")]
    NotAHello,
    #[error("the proof is wrong")]
    Unauthenticated,
}

impl Hello {
    pub(crate) fn encode(&self, secret: &Secret) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&self.purpose.magic());
        bytes[8..40].copy_from_slice(&self.job.0);
        bytes[40..48].copy_from_slice(&self.generation.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.from.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.to.to_le_bytes());
        let proof = mac(secret, &bytes[..AUTHENTICATED_BYTES]).finalize().into_bytes();
        bytes[AUTHENTICATED_BYTES..].copy_from_slice(&proof);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HELLO_BYTES], secret: &Secret) -> Result<Self, HelloError> {
        let channels = (1..CHANNELS_MAX).map(Purpose::Channel);
        let purpose = [Purpose::Host, Purpose::Leaders, Purpose::Ring, Purpose::State]
            .into_iter()
            .chain(channels)
            .find(|purpose| bytes[..8] == purpose.magic())
            .ok_or(HelloError::NotAHello)?;
        let (authenticated, proof) = bytes.split_at(AUTHENTICATED_BYTES);
        mac(secret, authenticated).verify_slice(proof).map_err(|_| HelloError::Unauthenticated)?;
        let mut job = [0; 32];
        job.copy_from_slice(&authenticated[8..40]);
        let number = |at: usize| {
            let field = authenticated[at..]
                .first_chunk()
                .expect("a field lies within the authenticated bytes");
            u64::from_le_bytes(*field)
        };
        Ok(Self {
            purpose,
            job: JobDigest(job),
            generation: number(40),
            from: number(48),
            to: number(56),
        })
    }

    /// Checks that this hello is for worker `own_id` of `job`.
    pub(crate) fn check(&self, job: JobDigest, own_id: u64) -> Result<(), HelloError> {
        if self.job != job {
            return Err(HelloError::AnotherJob);
        }
        if self.to != own_id {
            return Err(HelloError::AnotherWorker(self.to));
        }
        Ok(())
    }
}

impl Purpose {
    fn magic(self) -> [u8; 8] {
        match self {
            Self::Host => *b"EDLHOME1",
            Self::Leaders => *b"EDLLEAD1",
            Self::Ring => *b"EDLRING1",
            Self::State => *b"EDLSTAT1",
            Self::Channel(number) => [b'E', b'D', b'L', b'S', b'T', b'R', number, b'1'],
        }
    }
}

impl JobDigest {
    pub(crate) fn of(job: &str) -> Self {
        Self(Sha256::digest(job.as_bytes()).into())
    }
}

/// Maximum number of links between two neighbours, including the first one.
pub(crate) const CHANNELS_MAX: u8 = 16;

/// Length of a hello.
pub(crate) const HELLO_BYTES: usize = AUTHENTICATED_BYTES + 32;

const AUTHENTICATED_BYTES: usize = 64;

fn mac(secret: &Secret, message: &[u8]) -> Hmac<Sha256> {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(secret.bytes()).expect("HMAC takes keys of any length");
    mac.update(message);
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello { purpose: Purpose::Ring, job: JobDigest::of("job"), generation: 3, from: 4, to: 5 }
    }

    #[test]
    fn a_hello_survives_the_wire_and_does_not_carry_the_secret() {
        let bytes = hello().encode(&Secret::new("open sesame"));
        assert_eq!(Hello::decode(&bytes, &Secret::new("open sesame")), Ok(hello()));
        assert!(!bytes.windows(11).any(|window| window == b"open sesame"));
    }

    #[test]
    fn every_bit_is_authenticated() {
        let secret = Secret::new("open sesame");
        let bytes = hello().encode(&secret);
        for bit in 0..HELLO_BYTES * 8 {
            let mut forged = bytes;
            forged[bit / 8] ^= 1 << (bit % 8);
            let expected =
                if bit < 64 { HelloError::NotAHello } else { HelloError::Unauthenticated };
            assert_eq!(Hello::decode(&forged, &secret), Err(expected), "bit {bit}");
        }
    }

    #[test]
    fn a_hello_is_for_one_worker_of_one_job() {
        assert_eq!(hello().check(JobDigest::of("job"), 5), Ok(()));
        assert_eq!(hello().check(JobDigest::of("jobs"), 5), Err(HelloError::AnotherJob));
        assert_eq!(hello().check(JobDigest::of("job"), 4), Err(HelloError::AnotherWorker(5)));
    }

    #[test]
    fn a_hello_with_another_secret_is_refused() {
        let bytes = hello().encode(&Secret::new("open sesame"));
        assert_eq!(
            Hello::decode(&bytes, &Secret::new("open barley")),
            Err(HelloError::Unauthenticated)
        );
    }

    #[test]
    fn debug_does_not_show_the_secret() {
        assert_eq!(format!("{:?}", Secret::new("open sesame")), "Secret(..)");
    }
}
