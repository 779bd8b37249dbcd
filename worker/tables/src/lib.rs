//! Embedding tables that are divided over the workers of a job.
//!
//! A table holds rows of numbers by id. Its rows are divided into shards by hash; each shard lies
//! on several workers, so that the loss of one of them loses nothing. Rows change when a step is
//! committed, together with the parameters that all workers hold.
//!
//! | module | what is there |
//! |---|---|
//! | `table`, `optimizer` | what a table is |
//! | `block`, `index`, `rows`, `shard` | rows in memory |
//! | `changes` | what has changed in a shard since a step |
//! | `history` | what rows were before the last steps |
//! | `placement` | which workers hold which shard, and should |
//! | `lookup`, `distinct_ids` | ids of a batch, their rows and gradients |
//! | `owned` | a worker's shards, from its first group to its last |
//! | `owned::chunks` | the same of an optimizer's state, in place of rows |
//! | `export` | rows as they are exported |
//!
//! **Invariant:** no IO, no clock, no threads: a worker hands this crate what it has received, and
//! sends what it gets back.

mod block;
mod changes;
mod distinct_ids;
mod export;
mod history;
mod index;
mod lookup;
mod optimizer;
mod owned;
mod placement;
mod rows;
mod shard;
mod table;
mod wire;

pub use self::changes::{changed_shard, whole_shard};
pub use self::export::{ExportedRows, Part, collect};
pub use self::lookup::{BatchRows, Ids, RowGradients, TableGradients, id_of};
pub use self::optimizer::RowOptimizer;
pub use self::owned::chunks::{ChunkLayout, ChunkSums, ChunkUpdate, Chunks, SavedChunk};
pub use self::owned::contents::{HeldRow, OwnedSize};
pub use self::owned::look_ahead::Answered;
pub use self::owned::recovery::{LostShards, OwnedHeader, Recovery};
pub use self::owned::round::StepCommit;
pub use self::owned::saved::{ComparedShards, SavedShard, SavedShards};
pub use self::owned::{Content, Owned, Ownership, SHARDS, Settings};
pub use self::placement::{Member, Placement, ShardCopy, shard_of};
pub use self::shard::Shard;
pub use self::table::{Eviction, Initialization, Table, check, difference};
pub use self::wire::InvalidRows;
