//! The hub of a communicator of the fake NCCL: what the ranks give, and what they take.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};

use super::numbers::{FLOAT32, encode, numbers};

/// Header of a contribution; must be the same on all ranks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Head {
    pub kind: u8,
    pub dtype: u8,
    pub root: u32,
    pub len: u64,
}

impl Head {
    pub fn encode(self) -> [u8; 14] {
        let mut bytes = [0; 14];
        bytes[0] = self.kind;
        bytes[1] = self.dtype;
        bytes[2..6].copy_from_slice(&self.root.to_le_bytes());
        bytes[6..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; 14]) -> Self {
        Self {
            kind: bytes[0],
            dtype: bytes[1],
            root: u32::from_le_bytes(bytes[2..6].try_into().unwrap()),
            len: u64::from_le_bytes(bytes[6..].try_into().unwrap()),
        }
    }

    fn bytes(self) -> usize {
        let element = match self.dtype {
            FLOAT32 => 4,
            UINT8 => 1,
            _ => 2,
        };
        self.len as usize * element
    }

    /// The bytes that each of so many ranks gives.
    pub fn given(self, world: usize) -> usize {
        self.bytes() * if self.kind == REDUCE_SCATTER { world } else { 1 }
    }

    /// The bytes that each of so many ranks takes.
    pub fn taken(self, world: usize) -> usize {
        self.bytes() * if self.kind == ALL_GATHER { world } else { 1 }
    }
}

/// Body of the hub thread of one communicator.
pub fn serve(listener: &TcpListener, token: u64) {
    let mut links = BTreeMap::new();
    let mut world = 1;
    while links.len() < world {
        let Ok((mut link, _)) = listener.accept() else { return };
        let mut hello = [0; 16];
        if link.read_exact(&mut hello).is_err() || hello[..8] != token.to_le_bytes() {
            continue;
        }
        let _ = link.set_nodelay(true);
        world = u32::from_le_bytes(hello[12..].try_into().unwrap()) as usize;
        links.insert(u32::from_le_bytes(hello[8..12].try_into().unwrap()), link);
    }
    for link in links.values_mut() {
        let _ = link.write_all(&[1]);
    }
    while let Ok(parts) = links
        .values_mut()
        .map(|link| receive(link, world))
        .collect::<io::Result<Vec<_>>>()
    {
        if parts.iter().any(|(head, _)| *head != parts[0].0) {
            break;
        }
        let result = compute(parts[0].0, &parts);
        let taken = parts[0].0.taken(world);
        let is_divided = parts[0].0.kind == REDUCE_SCATTER;
        for (rank, link) in links.values_mut().enumerate() {
            let start = if is_divided { rank * taken } else { 0 };
            let _ = link.write_all(&result[start..start + taken]);
        }
    }
    // The remaining ranks detect nothing: their links stay open until all have closed theirs.
    for link in links.values_mut() {
        let _ = io::copy(link, &mut io::sink());
    }
}

fn receive(link: &mut TcpStream, world: usize) -> io::Result<(Head, Vec<u8>)> {
    let mut head = [0; 14];
    link.read_exact(&mut head)?;
    let head = Head::decode(head);
    let mut part = vec![0; head.given(world)];
    link.read_exact(&mut part)?;
    Ok((head, part))
}

fn compute(head: Head, parts: &[(Head, Vec<u8>)]) -> Vec<u8> {
    match head.kind {
        ALL_GATHER => parts.iter().flat_map(|(_, part)| part).copied().collect(),
        BROADCAST => parts[head.root as usize].1.clone(),
        _ => {
            let mut sums = vec![0.0_f32; numbers(head.dtype, &parts[0].1).len()];
            for (_, part) in parts {
                sums.iter_mut()
                    .zip(numbers(head.dtype, part))
                    .for_each(|(sum, number)| *sum += number);
            }
            sums.into_iter().flat_map(|sum| encode(head.dtype, sum)).collect()
        }
    }
}

pub const ALL_REDUCE: u8 = 0;
pub const BROADCAST: u8 = 1;
pub const ALL_GATHER: u8 = 2;
pub const REDUCE_SCATTER: u8 = 3;
pub const UINT8: u8 = 1;
