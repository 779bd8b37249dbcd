//! The notes that ranks attach to an all-reduce, as they are exchanged in shared memory.

use crate::algorithm::hosts::Hosts;
use crate::net::frame::to_wire;

/// Notes of all ranks.
#[derive(Debug)]
pub(crate) enum Notes {
    /// One note per rank.
    All(Vec<Vec<u8>>),
    /// At least one note does not fit into the region; the ranks exchange all notes over TCP
    /// instead.
    TooLong,
}

impl Notes {
    /// Encodes notes, each after its length (u32); the encoding is empty if a note is too long.
    pub(super) fn encode(&self) -> Vec<u8> {
        let Self::All(notes) = self else { return Vec::new() };
        let mut bytes = Vec::new();
        for note in notes {
            bytes.extend_from_slice(&to_wire(note.len()).to_le_bytes());
            bytes.extend_from_slice(note);
        }
        bytes
    }

    /// Decodes the notes of `count` ranks.
    pub(super) fn decode(mut bytes: &[u8], count: usize) -> Result<Self, String> {
        if bytes.is_empty() {
            return Ok(Self::TooLong);
        }
        let mut notes = Vec::with_capacity(count);
        while let Some((length, rest)) = bytes.split_first_chunk() {
            let length = u32::from_le_bytes(*length) as usize;
            let Some((note, rest)) = rest.split_at_checked(length) else { break };
            notes.push(note.to_vec());
            bytes = rest;
        }
        match (bytes.len(), notes.len()) {
            (0, found) if found == count => Ok(Self::All(notes)),
            (left, found) => Err(format!("expected {count} notes, got {found} and {left} bytes")),
        }
    }

    /// Decodes the notes of all ranks from the encodings of all hosts.
    pub(super) fn merge(by_host: &[Vec<u8>], hosts: &Hosts) -> Result<Self, String> {
        let bytes: usize = by_host.iter().map(Vec::len).sum();
        let mut all = vec![Vec::new(); hosts.rank_count()];
        let mut is_too_long = bytes > ALL_NOTES_BYTES;
        for (host, bytes) in by_host.iter().enumerate() {
            match Self::decode(bytes, hosts.ranks(host).len())? {
                Self::All(notes) => {
                    hosts.ranks(host).iter().zip(notes).for_each(|(rank, note)| all[*rank] = note);
                }
                Self::TooLong => is_too_long = true,
            }
        }
        Ok(if is_too_long { Self::TooLong } else { Self::All(all) })
    }
}

/// Maximum length of all notes together; longer ones are exchanged over TCP.
pub(super) const ALL_NOTES_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_notes_are_an_error() {
        let all = Notes::All(vec![b"one".to_vec(), Vec::new()]).encode();
        let Ok(Notes::All(notes)) = Notes::decode(&all, 2) else {
            panic!("the notes are well-formed")
        };
        assert_eq!(notes, [b"one".to_vec(), vec![]]);
        for cut in 1..all.len() {
            assert!(Notes::decode(&all[..cut], 2).is_err(), "{cut}");
        }
        assert!(Notes::decode(&all, 1).is_err());
        assert!(Notes::decode(&all, 3).is_err());
        assert!(Notes::decode(&[255; 9], 1).is_err());
        assert!(matches!(Notes::decode(&[], 2), Ok(Notes::TooLong)));
    }
}
