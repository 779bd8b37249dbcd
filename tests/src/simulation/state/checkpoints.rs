//! The storage of checkpoints, and the writes to it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use elasticdl::session::header::StateRecord;

/// Step, and the generation that wrote it.
pub(crate) type Key = (u64, u64);

/// The shared storage of checkpoints; it outlives all processes.
#[derive(Debug, Default)]
pub(crate) struct CheckpointStore {
    /// Parts of unfinished checkpoints, by rank.
    pub(crate) parts: BTreeMap<Key, BTreeMap<usize, Part>>,
    pub(crate) complete: BTreeMap<Key, (StateRecord, Vec<u8>)>,
    /// Shards of tables in complete checkpoints, by number.
    pub(crate) rows: BTreeMap<Key, SavedRows>,
    /// Whether writes are refused at the moment.
    pub(crate) is_unavailable: Rc<Cell<bool>>,
}

/// One write of a worker's checkpoint thread.
#[derive(Debug)]
pub(crate) enum CheckpointWork {
    Manifest { key: Key, record: StateRecord, world_size: usize },
    Part { key: Key, rank: usize, part: Part },
}

/// What one rank writes.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) parameters: Vec<u8>,
    pub(crate) rows: SavedRows,
    /// Of the shards, see [`WrittenRows::balance`](elasticdl::session::checkpoint::WrittenRows).
    pub(crate) balance: u64,
}

/// Shards of tables, by number.
pub(crate) type SavedRows = BTreeMap<u32, Vec<u8>>;
