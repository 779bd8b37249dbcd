//! Encryption of one direction of a link: AES-256-GCM with a key of its own and a counter as nonce.
//!
//! **Invariant:** a key never seals twice with one nonce, and seals at most [`USES_MAX`] times:
//! then both sides derive the next key from it, as the Noise protocol does (section 4.2, REKEY).

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};

/// Key of one direction, and the number of its uses.
#[derive(Debug)]
pub(crate) struct DirectionKey {
    key: LessSafeKey,
    uses: u64,
}

/// The bytes are not what the other side sealed at this point of the link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Forged;

impl DirectionKey {
    pub(crate) fn new(bytes: &[u8; KEY_BYTES]) -> Self {
        let key = UnboundKey::new(&AES_256_GCM, bytes).expect("the key has the cipher's length");
        Self { key: LessSafeKey::new(key), uses: 0 }
    }

    /// Encrypts `bytes` in place, and returns the tag that authenticates them and their position on
    /// the link.
    pub(crate) fn seal(&mut self, bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        let nonce = self.next_nonce();
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::empty(), bytes)
            .expect("a message is far shorter than the cipher's limit");
        *tag.as_ref().first_chunk().expect("the tag has the cipher's length")
    }

    /// Decrypts `bytes` in place.
    ///
    /// # Errors
    /// [`Forged`]; `bytes` then holds unspecified values.
    pub(crate) fn open(&mut self, bytes: &mut [u8], tag: [u8; TAG_BYTES]) -> Result<(), Forged> {
        let nonce = self.next_nonce();
        self.key
            .open_in_place_separate_tag(nonce, Aad::empty(), Tag::from(tag), bytes, 0..)
            .map(drop)
            .map_err(|_| Forged)
    }

    fn next_nonce(&mut self) -> Nonce {
        if self.uses == USES_MAX {
            let mut next = [0; KEY_BYTES];
            let _tag = self
                .key
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

    #[test]
    fn sealed_bytes_open_once_and_in_order() {
        let [mut ours, mut theirs] = pair();
        let mut sealed = [*b"one", *b"two"];
        let tags = sealed.each_mut().map(|bytes| ours.seal(bytes));
        assert!(!sealed.contains(b"one") && !sealed.contains(b"two"));
        let mut early = sealed[1];
        assert_eq!(theirs.open(&mut early, tags[1]), Err(Forged), "the second comes first");
        let [_, mut theirs] = pair();
        assert_eq!(theirs.open(&mut sealed[0].clone(), tags[0]), Ok(()));
        assert_eq!(theirs.open(&mut sealed[0], tags[0]), Err(Forged), "the first comes again");
    }

    #[test]
    fn every_bit_of_bytes_and_tag_is_authenticated() {
        let (mut sealed, length) = (*b"some bytes", 10);
        let tag = pair()[0].seal(&mut sealed);
        for bit in 0..(length + TAG_BYTES) * 8 {
            let (mut bytes, mut forged) = (sealed, tag);
            match bit / 8 {
                at if at < length => bytes[at] ^= 1 << (bit % 8),
                at => forged[at - length] ^= 1 << (bit % 8),
            }
            assert_eq!(pair()[1].open(&mut bytes, forged), Err(Forged), "bit {bit}");
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
