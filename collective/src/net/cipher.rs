//! Protection of one direction of a link: AES-256-GCM with a key of its own and a counter as nonce,
//! or a digest of the bytes and the counter, which finds what the network or a memory has changed,
//! but neither hides nor authenticates.
//!
//! **Invariant:** a key never seals twice with one nonce, and seals at most [`USES_MAX`] times:
//! then both sides derive the next key from it, as the Noise protocol does (section 4.2, REKEY).

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// What is done to the bytes of a link after the handshake.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Protection {
    None,
    Digests,
    Encryption,
}

/// Key of one direction, and the number of its uses.
#[derive(Debug)]
pub(crate) struct DirectionKey {
    /// `None` for digests.
    key: Option<LessSafeKey>,
    uses: u64,
}

/// The bytes are not what the other side sealed at this point of the link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Forged;

impl DirectionKey {
    pub(crate) fn new(bytes: &[u8; KEY_BYTES]) -> Self {
        let key = UnboundKey::new(&AES_256_GCM, bytes).expect("the key has the cipher's length");
        Self { key: Some(LessSafeKey::new(key)), uses: 0 }
    }

    /// Digests in place of encryption.
    pub(crate) fn digests() -> Self {
        Self { key: None, uses: 0 }
    }

    /// Encrypts `bytes` in place, if it is a key, and returns the tag of them and of their position
    /// on the link.
    pub(crate) fn seal(&mut self, bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        let nonce = self.next_nonce();
        let Some(key) = &self.key else { return self.digest(bytes) };
        let tag = key
            .seal_in_place_separate_tag(nonce, Aad::empty(), bytes)
            .expect("a message is far shorter than the cipher's limit");
        *tag.as_ref().first_chunk().expect("the tag has the cipher's length")
    }

    /// Decrypts `bytes` in place, and checks their tag.
    ///
    /// # Errors
    /// [`Forged`]; `bytes` then holds unspecified values.
    pub(crate) fn open(&mut self, bytes: &mut [u8], tag: [u8; TAG_BYTES]) -> Result<(), Forged> {
        let nonce = self.next_nonce();
        let Some(key) = &self.key else {
            return if self.digest(bytes) == tag { Ok(()) } else { Err(Forged) };
        };
        key.open_in_place_separate_tag(nonce, Aad::empty(), Tag::from(tag), bytes, 0..)
            .map(drop)
            .map_err(|_| Forged)
    }

    fn digest(&self, bytes: &[u8]) -> [u8; TAG_BYTES] {
        xxh3_128_with_seed(bytes, self.uses).to_le_bytes()
    }

    fn next_nonce(&mut self) -> Nonce {
        if let Some(key) = &self.key
            && self.uses == USES_MAX
        {
            let mut next = [0; KEY_BYTES];
            let _tag = key
                .seal_in_place_separate_tag(nonce(u64::MAX), Aad::empty(), &mut next)
                .expect("a key is far shorter than the cipher's limit");
            *self = Self::new(&next);
        }
        self.uses += 1;
        nonce(self.uses - 1)
    }
}

/// Length of a key.
pub(crate) const KEY_BYTES: usize = 32;

/// Length of a tag.
pub(crate) const TAG_BYTES: usize = 16;

/// Uses of a key: a message takes two, so this is 64 GiB in messages of 64 KiB. With 2³² blocks
/// under a key, AES in counter mode differs from random bytes with a probability of 2⁻⁶⁵.
const USES_MAX: u64 = 1 << 21;

/// Nonce of the Noise protocol for AES-GCM: four zero bytes, then the counter, big endian.
fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> [DirectionKey; 2] {
        [(); 2].map(|()| DirectionKey::new(&[7; KEY_BYTES]))
    }

    fn digests() -> [DirectionKey; 2] {
        [(); 2].map(|()| DirectionKey::digests())
    }

    #[test]
    fn sealed_bytes_open_once_and_in_order() {
        for (make, hides) in [(pair as fn() -> [DirectionKey; 2], true), (digests, false)] {
            let [mut ours, mut theirs] = make();
            let mut sealed = [*b"one", *b"two"];
            let tags = sealed.each_mut().map(|bytes| ours.seal(bytes));
            assert_eq!(sealed.map(|bytes| [b"one", b"two"].contains(&&bytes)), [!hides; 2]);
            let mut early = sealed[1];
            assert_eq!(theirs.open(&mut early, tags[1]), Err(Forged), "the second comes first");
            let [_, mut theirs] = make();
            assert_eq!(theirs.open(&mut sealed[0].clone(), tags[0]), Ok(()));
            assert_eq!(theirs.open(&mut sealed[0], tags[0]), Err(Forged), "the first comes again");
        }
    }

    #[test]
    fn every_flipped_bit_of_bytes_and_tag_is_found() {
        for make in [pair, digests] {
            let (mut sealed, length) = (*b"some bytes", 10);
            let tag = make()[0].seal(&mut sealed);
            for bit in 0..(length + TAG_BYTES) * 8 {
                let (mut bytes, mut forged) = (sealed, tag);
                match bit / 8 {
                    at if at < length => bytes[at] ^= 1 << (bit % 8),
                    at => forged[at - length] ^= 1 << (bit % 8),
                }
                assert_eq!(make()[1].open(&mut bytes, forged), Err(Forged), "bit {bit}");
            }
        }
    }

    #[test]
    fn both_sides_change_the_key_after_the_same_use() {
        let [mut ours, mut theirs] = pair();
        for _ in 0..USES_MAX + 2 {
            let mut bytes = *b"x";
            let tag = ours.seal(&mut bytes);
            assert_eq!((theirs.open(&mut bytes, tag), &bytes), (Ok(()), b"x"));
        }
        assert_eq!((ours.uses, theirs.uses), (2, 2));
        let mut under_first_key = *b"x";
        let tag = pair()[0].seal(&mut under_first_key);
        theirs.uses = 0;
        assert_eq!(theirs.open(&mut under_first_key, tag), Err(Forged), "the key has not changed");
    }
}
