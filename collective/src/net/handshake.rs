//! Handshake: the first bytes on every link. Both workers prove that they know the job's secret,
//! agree on a purpose, a generation and a protection, and get fresh keys. No IO.
//!
//! ```text
//!   dialling worker                                                       acceptor
//!      │ magic │ e │ hello, sealed under secret and e ───────────────────────► │
//!      │ ◄─────────────────────────── e' │ tag under secret, e, e' and hello │
//!      │ tag under the keys of the link ─────────────────────────────────────► │
//! ```
//!
//! The first two messages are those of the Noise protocol `NNpsk0` with X25519, AES-256-GCM and
//! SHA-256, as the crate `snow` implements it. `e` and `e'` are ephemeral public keys, and the
//! secret is the job's, [derived](Secret::link_key) for this purpose alone.
//!
//! **Invariant:** the secret is never sent, and a field of the hello is used only after its tag is
//! verified.
//!
//! **Invariant:** a recorded first message, sent again, gets an answer and nothing else: only the
//! worker that made `e` can send the third message. The dialling worker sends nothing more before
//! it has verified the answer, which only a worker with the secret can make, and for this `e` only.
//!
//! A link is confidential even if the secret becomes known later, because its keys depend on the
//! ephemeral ones.

use sha2::{Digest, Sha256};
use snow::params::NoiseParams;
use snow::resolvers::{DefaultResolver, FallbackResolver, RingResolver};
use snow::{Builder, HandshakeState};

use super::cipher::{DirectionKey, KEY_BYTES, Protection, TAG_BYTES};
use super::link::LinkKeys;
use crate::Secret;

/// What the dialling worker wants.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    pub(crate) job: JobDigest,
    pub(crate) generation: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Of the bytes after the handshake.
    pub(crate) protection: Protection,
}

/// Purpose of a link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// Link of the ring of the ranks on one host, in a group on several hosts.
    Host,
    /// Link of the ring of the hosts' leaders.
    Leaders,
    /// Link between two ranks that are no neighbours in a ring, used in both directions.
    Pair,
    /// Link of the ring of a generation.
    Ring,
    /// Link for a state transfer, independent of the generation.
    State,
    /// Link to the right child in the tree of a large group, used in both directions.
    Tree,
    /// Additional link between the same members as [`Ring`](Self::Ring), with its number from 1.
    Channel(u8),
}

/// Digest of the job's name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct JobDigest([u8; 32]);

/// Why a handshake failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("the hello names another job")]
    AnotherJob,
    #[error("the hello is for worker {0}")]
    AnotherWorker(u64),
    #[error("not a hello")]
    NotAHello,
    #[error("it did not prove that it knows the job's secret")]
    Unauthenticated,
    #[error("it does not encrypt the link, which leaves this host")]
    Unencrypted,
}

/// The dialling worker's side, until the acceptor answers.
#[derive(Debug)]
pub(crate) struct Initiator(Box<HandshakeState>);

impl Initiator {
    /// Begins a handshake; returns the message to send first.
    pub(crate) fn new(hello: &Hello, secret: &Secret) -> (Self, [u8; FIRST_BYTES]) {
        let mut state = noise(secret, |builder| builder.build_initiator());
        let mut first = [0; FIRST_BYTES];
        first[..MAGIC.len()].copy_from_slice(&MAGIC);
        let length = state.write_message(&hello.encode(), &mut first[MAGIC.len()..]);
        debug_assert_eq!(length, Ok(FIRST_BYTES - MAGIC.len()));
        (Self(Box::new(state)), first)
    }

    /// Verifies the acceptor's answer. Returns the link's keys, and the message to send.
    ///
    /// # Errors
    /// [`HandshakeError::Unauthenticated`].
    pub(crate) fn finish(
        mut self,
        answer: &[u8; ANSWER_BYTES],
    ) -> Result<(LinkKeys, [u8; CONFIRMATION_BYTES]), HandshakeError> {
        let read = self.0.read_message(answer, &mut []);
        read.map_err(|_| HandshakeError::Unauthenticated)?;
        let (ours, theirs) = self.0.dangerously_get_raw_split();
        let mut keys =
            LinkKeys { seals: DirectionKey::new(&ours), opens: DirectionKey::new(&theirs) };
        let confirmation = keys.seals.seal(&mut []);
        Ok((keys, confirmation))
    }
}

/// The acceptor's side, with a hello whose sender is not proven to be present.
#[derive(Debug)]
pub(crate) struct Responder {
    hello: Hello,
    state: HandshakeState,
}

impl Responder {
    /// Verifies that the first message was made with the secret, now or at another time.
    ///
    /// # Errors
    /// [`HandshakeError::NotAHello`], [`HandshakeError::Unauthenticated`].
    pub(crate) fn new(first: &[u8; FIRST_BYTES], secret: &Secret) -> Result<Self, HandshakeError> {
        let message = first.strip_prefix(&MAGIC).ok_or(HandshakeError::NotAHello)?;
        let mut state = noise(secret, |builder| builder.build_responder());
        let mut hello = [0; HELLO_BYTES];
        let read = state.read_message(message, &mut hello);
        read.map_err(|_| HandshakeError::Unauthenticated)?;
        Ok(Self { hello: Hello::decode(&hello)?, state })
    }

    pub(crate) fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Returns the answer to send.
    ///
    /// # Errors
    /// [`HandshakeError::Unauthenticated`] if the dialling worker's ephemeral key is invalid.
    pub(crate) fn answer(mut self) -> Result<(Unconfirmed, [u8; ANSWER_BYTES]), HandshakeError> {
        let mut answer = [0; ANSWER_BYTES];
        let written = self.state.write_message(&[], &mut answer);
        written.map_err(|_| HandshakeError::Unauthenticated)?;
        let (theirs, ours) = self.state.dangerously_get_raw_split();
        let keys = LinkKeys { seals: DirectionKey::new(&ours), opens: DirectionKey::new(&theirs) };
        Ok((Unconfirmed { hello: self.hello, keys }, answer))
    }
}

/// The acceptor's side, until the dialling worker confirms the keys.
#[derive(Debug)]
pub(crate) struct Unconfirmed {
    hello: Hello,
    keys: LinkKeys,
}

impl Unconfirmed {
    /// Verifies the third message: its sender made the first one, for this handshake.
    ///
    /// # Errors
    /// [`HandshakeError::Unauthenticated`].
    pub(crate) fn confirm(
        mut self,
        confirmation: [u8; CONFIRMATION_BYTES],
    ) -> Result<(Hello, LinkKeys), HandshakeError> {
        let opened = self.keys.opens.open(&mut [], confirmation);
        opened.map_err(|_| HandshakeError::Unauthenticated)?;
        Ok((self.hello, self.keys))
    }
}

impl Hello {
    /// Checks that this hello is for worker `own_id` of `job`.
    pub(crate) fn check(&self, job: JobDigest, own_id: u64) -> Result<(), HandshakeError> {
        if self.job != job {
            return Err(HandshakeError::AnotherJob);
        }
        if self.to != own_id {
            return Err(HandshakeError::AnotherWorker(self.to));
        }
        Ok(())
    }

    fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..2].copy_from_slice(&self.purpose.code());
        bytes[2] = match self.protection {
            Protection::None => 0,
            Protection::Encryption => 1,
            Protection::Digests => 2,
        };
        bytes[3..35].copy_from_slice(&self.job.0);
        for (field, number) in
            bytes[35..].chunks_exact_mut(8).zip([self.generation, self.from, self.to])
        {
            field.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, HandshakeError> {
        let channels = (1..CHANNELS_MAX).map(Purpose::Channel);
        let purpose = Purpose::UNNUMBERED
            .into_iter()
            .chain(channels)
            .find(|purpose| bytes[..2] == purpose.code())
            .ok_or(HandshakeError::NotAHello)?;
        let protection = match bytes[2] {
            0 => Protection::None,
            1 => Protection::Encryption,
            2 => Protection::Digests,
            _ => return Err(HandshakeError::NotAHello),
        };
        let mut job = [0; 32];
        job.copy_from_slice(&bytes[3..35]);
        let number = |at: usize| {
            let field = bytes[at..].first_chunk().expect("a field lies within the hello");
            u64::from_le_bytes(*field)
        };
        Ok(Self {
            purpose,
            job: JobDigest(job),
            generation: number(35),
            from: number(43),
            to: number(51),
            protection,
        })
    }
}

impl Purpose {
    const UNNUMBERED: [Self; 6] =
        [Self::Host, Self::Leaders, Self::Pair, Self::Ring, Self::State, Self::Tree];

    fn code(self) -> [u8; 2] {
        match self {
            Self::Host => [1, 0],
            Self::Leaders => [2, 0],
            Self::Pair => [6, 0],
            Self::Ring => [3, 0],
            Self::State => [4, 0],
            Self::Tree => [7, 0],
            Self::Channel(number) => [5, number],
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

/// Length of the dialling worker's first message.
pub(crate) const FIRST_BYTES: usize = MAGIC.len() + PUBLIC_KEY_BYTES + HELLO_BYTES + TAG_BYTES;

/// Length of the acceptor's answer.
pub(crate) const ANSWER_BYTES: usize = PUBLIC_KEY_BYTES + TAG_BYTES;

/// Length of the dialling worker's second message.
pub(crate) const CONFIRMATION_BYTES: usize = TAG_BYTES;

/// First bytes of every link, with the version of the protocol.
const MAGIC: [u8; 8] = *b"EDLLINK3";

const HELLO_BYTES: usize = 59;

const PUBLIC_KEY_BYTES: usize = 32;

const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// Builds one side of the protocol.
fn noise(
    secret: &Secret,
    build: impl FnOnce(Builder<'_>) -> Result<HandshakeState, snow::Error>,
) -> HandshakeState {
    let params: NoiseParams = PATTERN.parse().expect("the pattern is one of the protocol's");
    let resolver = FallbackResolver::new(Box::new(RingResolver), Box::new(DefaultResolver));
    let key: [u8; KEY_BYTES] = secret.link_key();
    Builder::with_resolver(params, Box::new(resolver))
        .psk(0, &key)
        .and_then(|builder| builder.prologue(&MAGIC))
        .and_then(build)
        .expect("the pattern needs a secret, a random number and these primitives")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            purpose: Purpose::Ring,
            job: JobDigest::of("job"),
            generation: 3,
            from: 4,
            to: 5,
            protection: Protection::Encryption,
        }
    }

    fn secret() -> Secret {
        Secret::new("open sesame")
    }

    fn answered() -> (Initiator, Unconfirmed, [u8; ANSWER_BYTES]) {
        let (initiator, first) = Initiator::new(&hello(), &secret());
        let (unconfirmed, answer) = Responder::new(&first, &secret()).unwrap().answer().unwrap();
        (initiator, unconfirmed, answer)
    }

    /// The error of the acceptor, whether the bytes are no hello or made with another secret.
    fn refusal(first: &[u8; FIRST_BYTES]) -> HandshakeError {
        Responder::new(first, &secret()).unwrap_err()
    }

    #[test]
    fn both_sides_agree_on_the_hello_and_on_keys() {
        let channels = (1..CHANNELS_MAX).map(Purpose::Channel);
        let purposes = Purpose::UNNUMBERED.into_iter().chain(channels);
        let protections = [Protection::None, Protection::Digests, Protection::Encryption];
        for (purpose, protection) in
            purposes.flat_map(|purpose| protections.map(|protection| (purpose, protection)))
        {
            let hello = Hello { purpose, protection, ..hello() };
            let (initiator, first) = Initiator::new(&hello, &secret());
            let responder = Responder::new(&first, &secret()).unwrap();
            assert_eq!(responder.hello(), &hello);
            let (unconfirmed, answer) = responder.answer().unwrap();
            let (mut ours, confirmation) = initiator.finish(&answer).unwrap();
            let (confirmed, mut theirs) = unconfirmed.confirm(confirmation).unwrap();
            assert_eq!(confirmed, hello);
            let (from, to) = (&mut ours, &mut theirs);
            let mut bytes = *b"gradients";
            let tag = from.seals.seal(&mut bytes);
            assert_eq!((to.opens.open(&mut bytes, tag), &bytes), (Ok(()), b"gradients"));
            let tag = to.seals.seal(&mut bytes);
            assert_eq!((from.opens.open(&mut bytes, tag), &bytes), (Ok(()), b"gradients"));
        }
    }

    #[test]
    fn neither_secret_nor_hello_is_readable() {
        let (_, first) = Initiator::new(&hello(), &secret());
        assert!(!first.windows(11).any(|window| window == b"open sesame"));
        assert!(!first.windows(8).any(|window| window == &JobDigest::of("job").0[..8]));
        assert_eq!(format!("{:?}", secret()), "Secret(..)");
    }

    #[test]
    fn every_bit_of_every_message_is_authenticated() {
        let (_, first) = Initiator::new(&hello(), &secret());
        for bit in 0..FIRST_BYTES * 8 {
            let mut forged = first;
            forged[bit / 8] ^= 1 << (bit % 8);
            let magic = bit < MAGIC.len() * 8;
            let expected =
                if magic { HandshakeError::NotAHello } else { HandshakeError::Unauthenticated };
            assert_eq!(refusal(&forged), expected, "bit {bit} of the first message");
        }
        for bit in 0..ANSWER_BYTES * 8 {
            let (initiator, _, mut answer) = answered();
            answer[bit / 8] ^= 1 << (bit % 8);
            // The last bit of a public key has no meaning to X25519; the tag covers it.
            let error = initiator.finish(&answer).unwrap_err();
            assert_eq!(error, HandshakeError::Unauthenticated, "bit {bit} of the answer");
        }
        for bit in 0..CONFIRMATION_BYTES * 8 {
            let (initiator, unconfirmed, answer) = answered();
            let (_, mut confirmation) = initiator.finish(&answer).unwrap();
            confirmation[bit / 8] ^= 1 << (bit % 8);
            let error = unconfirmed.confirm(confirmation).unwrap_err();
            assert_eq!(error, HandshakeError::Unauthenticated, "bit {bit} of the confirmation");
        }
    }

    #[test]
    fn recorded_messages_are_worth_nothing_in_another_handshake() {
        let (initiator, first) = Initiator::new(&hello(), &secret());
        let (recorded, answer) = Responder::new(&first, &secret()).unwrap().answer().unwrap();
        let (_, confirmation) = initiator.finish(&answer).unwrap();
        assert!(recorded.confirm(confirmation).is_ok());
        // The same first message gets another answer, whose keys the recorded confirmation lacks.
        let (again, other) = Responder::new(&first, &secret()).unwrap().answer().unwrap();
        assert_ne!(other, answer);
        assert_eq!(again.confirm(confirmation).unwrap_err(), HandshakeError::Unauthenticated);
        // A recorded answer does not fit another first message.
        let (next, _) = Initiator::new(&hello(), &secret());
        assert_eq!(next.finish(&answer).unwrap_err(), HandshakeError::Unauthenticated);
    }

    #[test]
    fn a_worker_with_another_secret_is_refused_by_either_side() {
        let (initiator, first) = Initiator::new(&hello(), &Secret::new("open barley"));
        assert_eq!(refusal(&first), HandshakeError::Unauthenticated);
        let impostor = Responder::new(&first, &Secret::new("open barley")).unwrap();
        let (_, answer) = impostor.answer().unwrap();
        assert!(initiator.finish(&answer).is_ok());
        let (initiator, _) = Initiator::new(&hello(), &secret());
        assert_eq!(initiator.finish(&answer).unwrap_err(), HandshakeError::Unauthenticated);
    }

    #[test]
    fn a_hello_is_for_one_worker_of_one_job() {
        assert_eq!(hello().check(JobDigest::of("job"), 5), Ok(()));
        assert_eq!(hello().check(JobDigest::of("jobs"), 5), Err(HandshakeError::AnotherJob));
        assert_eq!(hello().check(JobDigest::of("job"), 4), Err(HandshakeError::AnotherWorker(5)));
    }

    #[test]
    fn a_hello_with_an_unknown_purpose_is_no_hello() {
        let mut bytes = hello().encode();
        bytes[0] = 9;
        assert_eq!(Hello::decode(&bytes), Err(HandshakeError::NotAHello));
        let mut bytes = hello().encode();
        bytes[2] = 3;
        assert_eq!(Hello::decode(&bytes), Err(HandshakeError::NotAHello));
    }
}
