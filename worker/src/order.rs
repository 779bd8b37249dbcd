//! The order in which the records of an epoch are trained.
//!
//! Gradients and the ledger name **positions** in this order, from 0. Only reading and the
//! reports about records need the records themselves, which are numbered through the files of the
//! data set. The order depends on the data set's files, the seed and the epoch alone: not on the
//! workers, nor on time.
//!
//! | `--shuffle` | position `p` holds |
//! |---|---|
//! | `none` | record `p` |
//! | `record` | the record that a permutation of all records maps `p` to |
//! | `block` | see [`Layout`]: blocks are permuted, then the records within a few blocks |
//!
//! **Invariant:** no IO. In each epoch every record has one position. A released version of the
//! order never changes: checkpoints hold positions.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use elasticdl_data::{Access, Dataset};
use elasticdl_proto::{RecordRange, Shuffle, ShuffleMode};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// The order of a data set's records in each epoch.
#[derive(Debug)]
pub(crate) struct Order {
    seed: u64,
    /// Number of records of the data set.
    records: u64,
    kind: Kind,
}

/// An order, as checkpoints name it. Its field names are a public format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OrderName {
    pub(crate) mode: ShuffleMode,
    pub(crate) seed: u64,
    /// Records of a block; 0 where no blocks are shuffled.
    pub(crate) block: u64,
    /// Least number of records that are mixed at a time; 0 where no blocks are shuffled.
    pub(crate) buffer: u64,
}

#[derive(Debug)]
enum Kind {
    Blocks(Blocks),
    InOrder,
    Records,
}

impl fmt::Display for OrderName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, seed, block, buffer } = self;
        match mode {
            ShuffleMode::Block => write!(
                f,
                "--shuffle block --shuffle-buffer {buffer} --seed {seed}, in blocks of {block} \
                 records"
            ),
            ShuffleMode::None => write!(f, "--shuffle none"),
            ShuffleMode::Auto | ShuffleMode::Record => write!(f, "--shuffle record --seed {seed}"),
        }
    }
}

/// Blocks of consecutive records of one file.
#[derive(Debug)]
struct Blocks {
    /// Records of a block, but for the last of each file, which may have fewer.
    records: u64,
    buffer: u64,
    /// First record of each block, and the number of all records.
    firsts: Vec<u64>,
    /// Layouts of the epochs that were used last.
    layouts: Mutex<BTreeMap<u32, Arc<Layout>>>,
}

/// The order of the blocks in one epoch. Consecutive blocks of this order form a buffer as soon as
/// they hold enough records; the records of a buffer are permuted.
#[derive(Debug)]
struct Layout {
    blocks: Vec<u32>,
    /// First position of each block if nothing were permuted within buffers, and the number of all
    /// records.
    starts: Vec<u64>,
    /// For each buffer, its first block in `blocks`, and the number of all blocks.
    buffers: Vec<usize>,
    epoch: u32,
}

impl Order {
    /// The order of `dataset` that `shuffle` and `seed` choose, for a reader with this access.
    pub(crate) fn new(shuffle: Shuffle, seed: u64, dataset: &Dataset, access: Access) -> Self {
        let records = dataset.files.iter().map(|file| file.records).sum();
        let kind = match (shuffle.mode, access) {
            (ShuffleMode::None, _) | (ShuffleMode::Auto, Access::Ordered) => Kind::InOrder,
            (ShuffleMode::Auto | ShuffleMode::Block, Access::Block { records }) => {
                Kind::Blocks(Blocks::cut(dataset, records, shuffle))
            }
            (ShuffleMode::Block, _) => Kind::Blocks(Blocks::cut(dataset, BLOCK_RECORDS, shuffle)),
            (ShuffleMode::Auto | ShuffleMode::Record, _) => Kind::Records,
        };
        Self { seed, records, kind }
    }

    /// The order of the data itself.
    pub(crate) fn of_data(dataset: &Dataset) -> Self {
        Self::new(Shuffle::NONE, 0, dataset, Access::Record)
    }

    pub(crate) fn name(&self) -> OrderName {
        let (mode, block, buffer) = match &self.kind {
            Kind::Blocks(blocks) => (ShuffleMode::Block, blocks.records, blocks.buffer),
            Kind::InOrder => (ShuffleMode::None, 0, 0),
            Kind::Records => (ShuffleMode::Record, 0, 0),
        };
        // Without a shuffle every seed gives the same order.
        let seed = if self.is_of_data() { 0 } else { self.seed };
        OrderName { mode, seed, block, buffer }
    }

    /// The records at these positions, which lie in the data set.
    pub(crate) fn records(&self, positions: RecordRange) -> Vec<u64> {
        let RecordRange { epoch, start, end } = positions;
        match &self.kind {
            Kind::Blocks(blocks) => {
                let layout = blocks.layout(self.seed, epoch);
                (start..end).map(|at| blocks.record(&layout, self.seed, at)).collect()
            }
            Kind::InOrder => (start..end).collect(),
            Kind::Records => {
                let all = Permutation::new(self.records, self.seed, epoch, Purpose::Records);
                (start..end).map(|at| all.at(at)).collect()
            }
        }
    }

    /// The records at these positions as few ranges, in ascending order: at most [`RANGES_MAX`].
    pub(crate) fn ranges(&self, positions: &[RecordRange]) -> Vec<RecordRange> {
        let mut ranges: Vec<RecordRange> = Vec::new();
        let mut records: Vec<(u32, u64)> = positions
            .iter()
            .flat_map(|range| self.records(*range).into_iter().map(|record| (range.epoch, record)))
            .collect();
        records.sort_unstable();
        for (epoch, record) in records {
            match ranges.last_mut() {
                Some(last) if last.epoch == epoch && last.end == record => last.end += 1,
                _ => ranges.push(RecordRange { epoch, start: record, end: record + 1 }),
            }
            if ranges.len() > RANGES_MAX {
                ranges.pop();
                break;
            }
        }
        ranges
    }

    /// Whether positions are records.
    pub(crate) fn is_of_data(&self) -> bool {
        matches!(self.kind, Kind::InOrder)
    }

    /// The records of the block that holds `record`; `None` where no blocks are shuffled.
    pub(crate) fn block(&self, record: u64) -> Option<Range<u64>> {
        let Kind::Blocks(blocks) = &self.kind else { return None };
        let block = blocks.firsts.partition_point(|&first| first <= record) - 1;
        Some(blocks.firsts[block]..blocks.firsts[block + 1])
    }

    /// Number of records of the largest buffer, where blocks are shuffled.
    pub(crate) fn buffer(&self) -> u64 {
        match &self.kind {
            Kind::Blocks(blocks) => blocks.buffer.saturating_add(blocks.records),
            Kind::InOrder | Kind::Records => 0,
        }
    }
}

impl Blocks {
    fn cut(dataset: &Dataset, records: u64, shuffle: Shuffle) -> Self {
        let total: u64 = dataset.files.iter().map(|file| file.records).sum();
        let records = records.max(1).max(total / BLOCKS_MAX);
        let (mut firsts, mut at) = (Vec::new(), 0);
        for file in dataset.files.iter().filter(|file| file.records > 0) {
            let blocks = file.records.div_ceil(records);
            firsts.extend((0..blocks).map(|block| at + block * records));
            at += file.records;
        }
        firsts.push(at);
        let buffer = shuffle.buffer.map_or(BUFFER_RECORDS, std::num::NonZeroU64::get);
        Self { records, buffer, firsts, layouts: Mutex::default() }
    }

    fn layout(&self, seed: u64, epoch: u32) -> Arc<Layout> {
        let mut layouts = self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(layout) = layouts.get(&epoch) {
            return Arc::clone(layout);
        }
        if layouts.len() >= EPOCHS_KEPT {
            layouts.pop_first();
        }
        let layout = Arc::new(Layout::new(self, seed, epoch));
        layouts.insert(epoch, Arc::clone(&layout));
        layout
    }

    fn record(&self, layout: &Layout, seed: u64, position: u64) -> u64 {
        let block = layout.starts.partition_point(|&start| start <= position) - 1;
        let buffer = layout.buffers.partition_point(|&first| first <= block) - 1;
        let (first, end) = (layout.buffers[buffer], layout.buffers[buffer + 1]);
        let (start, len) = (layout.starts[first], layout.starts[end] - layout.starts[first]);
        let within = Permutation::new(len, seed, layout.epoch, Purpose::Buffer(buffer as u64));
        let at = start + within.at(position - start);
        let block = layout.starts[first..end].partition_point(|&start| start <= at) - 1 + first;
        self.firsts[layout.blocks[block] as usize] + (at - layout.starts[block])
    }
}

impl Layout {
    fn new(cut: &Blocks, seed: u64, epoch: u32) -> Self {
        let count = cut.firsts.len() as u64 - 1;
        let all = Permutation::new(count, seed, epoch, Purpose::Blocks);
        let blocks: Vec<u32> = (0..count).map(|at| all.at(at) as u32).collect();
        let (mut starts, mut buffers, mut at) = (Vec::new(), vec![0], 0);
        for (i, &block) in blocks.iter().enumerate() {
            if at - starts.get(buffers[buffers.len() - 1]).copied().unwrap_or(at) >= cut.buffer {
                buffers.push(i);
            }
            starts.push(at);
            at += cut.firsts[block as usize + 1] - cut.firsts[block as usize];
        }
        starts.push(at);
        buffers.push(blocks.len());
        Self { blocks, starts, buffers, epoch }
    }
}

/// A pseudo-random permutation of `0..len` that takes no memory: a Feistel network over the least
/// even number of bits that hold `len`. Results outside are permuted again (cycle walking).
///
/// Black & Rogaway, Ciphers with arbitrary finite domains (CT-RSA 2002).
#[derive(Debug)]
struct Permutation {
    len: u64,
    /// Bits of each of the two halves.
    bits: u32,
    keys: [u64; ROUNDS],
}

/// What is permuted; each has keys of its own.
#[derive(Clone, Copy)]
enum Purpose {
    Records,
    Blocks,
    Buffer(u64),
    /// A stratum of the records, of which validation data is chosen.
    Stratum(u64),
}

/// A permutation of `0..len` that `seed` and `number` determine.
pub(crate) fn permuted(len: u64, seed: u64, number: u64) -> impl Fn(u64) -> u64 {
    let permutation = Permutation::new(len, seed, 0, Purpose::Stratum(number));
    move |index| permutation.at(index)
}

impl Permutation {
    fn new(len: u64, seed: u64, epoch: u32, purpose: Purpose) -> Self {
        let (kind, number) = match purpose {
            Purpose::Records => (0u64, 0),
            Purpose::Blocks => (1, 0),
            Purpose::Buffer(number) => (2, number),
            Purpose::Stratum(number) => (3, number),
        };
        let bits = (u64::BITS - len.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
        let mut input = [0; 40];
        for (i, word) in [seed, epoch.into(), kind, number].into_iter().enumerate() {
            input[8 * i..8 * i + 8].copy_from_slice(&word.to_le_bytes());
        }
        let keys = std::array::from_fn(|round| {
            input[32..].copy_from_slice(&(round as u64).to_le_bytes());
            xxh3_64(&input)
        });
        Self { len, bits, keys }
    }

    fn at(&self, index: u64) -> u64 {
        let mut at = index;
        loop {
            at = self.mix(at);
            if at < self.len {
                return at;
            }
        }
    }

    fn mix(&self, value: u64) -> u64 {
        let mask = (1 << self.bits) - 1;
        let (mut left, mut right) = (value >> self.bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (scramble(right ^ key) & mask));
        }
        (left << self.bits) | right
    }
}

/// The finalizer of SplitMix64.
fn scramble(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Maximum number of ranges in a report about records.
const RANGES_MAX: usize = 256;
const ROUNDS: usize = 6;
/// Records of a block where the reader prefers none.
const BLOCK_RECORDS: u64 = 1024;
/// Default of `--shuffle-buffer`.
const BUFFER_RECORDS: u64 = 8192;
/// A layout takes 12 bytes for each.
const BLOCKS_MAX: u64 = 1 << 24;
const EPOCHS_KEPT: usize = 2;

#[cfg(test)]
mod tests;
