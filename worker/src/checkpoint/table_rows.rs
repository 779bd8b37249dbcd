//! What a manifest says of files of rows: of a model's tables, or of a sharded optimizer's state.

use std::collections::BTreeSet;

use elasticdl_tables::{ChunkLayout, SHARDS, Table};
use serde::{Deserialize, Serialize};

use super::manifest::JobFingerprint;
use super::name::{self, Name};
use crate::session::checkpoint::{Written, WrittenRows};

/// The rows of a model's tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct TableRows {
    pub(super) tables: Vec<Table>,
    /// Seed of the rows that no record has touched.
    pub(super) seed: u64,
    /// Number of shards that the rows are divided into.
    pub(super) shards: u32,
    /// Sum of the touches of all rows.
    pub(super) touches: u64,
    pub(super) files: Vec<RowsFile>,
    /// The checkpoints that this one is based on.
    #[serde(default)]
    pub(super) chain: Chain,
}

/// A checkpoint with all rows, and those that follow it with what has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Chain {
    /// Checkpoints with changes, up to this one.
    pub(super) changes: u32,
    /// Bytes of all rows, in the first one.
    pub(super) whole_bytes: u64,
    /// Bytes of the changes.
    pub(super) changed_bytes: u64,
}

/// The optimizer's state in chunks of the parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ChunkedSlots {
    /// Number of parameters of a chunk; the last one may have fewer.
    pub(super) chunk_len: u64,
    /// Whether the first slot of each parameter is the parameter itself, which is nowhere else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) has_parameters: bool,
    /// Number of floats of the optimizer's state that are not divided, but in the shards.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) whole: u64,
    /// The first parameter with state in the chunks.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) first: u64,
    /// A file has the same form as one of rows. A chunk is `[slots, parameters of the chunk]`.
    pub(super) files: Vec<RowsFile>,
}

impl ChunkedSlots {
    /// `of_ranks`: the chunks that each rank has written.
    pub(super) fn new(
        fingerprint: &JobFingerprint,
        parts: &[Written],
        of_ranks: &[Vec<u32>],
    ) -> Self {
        let chunk_len = fingerprint.layout().chunk_len as u64;
        let has_parameters = fingerprint.chunks_have_parameters;
        let files = RowsFile::of_ranks(fingerprint, parts, of_ranks);
        let (whole, first) = (fingerprint.whole as u64, fingerprint.first as u64);
        Self { chunk_len, has_parameters, whole, first, files }
    }

    /// Checks that each chunk of a state of this size lies in one file.
    pub(super) fn check(&self, parameters: u64, slots: u64) -> Result<(), String> {
        let with_state = parameters.checked_sub(self.first);
        let is_divided = slots.checked_sub(self.whole).zip(with_state);
        let is_divided = is_divided.is_some_and(|(slots, of)| slots.is_multiple_of(of.max(1)));
        if self.chunk_len == 0 || !is_divided {
            return Err(format!("its optimizer has chunks of {} parameters", self.chunk_len));
        }
        check_files(&self.files, parameters.div_ceil(self.chunk_len).max(1))
    }

    /// Of a state of this size.
    pub(super) fn layout(&self, parameters: usize, slots: usize) -> ChunkLayout {
        let (chunk_len, more) = (self.chunk_len as usize, usize::from(self.has_parameters));
        let (whole, first) = (self.whole as usize, self.first as usize);
        let slots = (slots - whole) / (parameters - first).max(1) + more;
        ChunkLayout { parameters, first, slots, chunk_len }
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A file with shards of the tables' rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RowsFile {
    pub(super) file: String,
    pub(super) bytes: u64,
    /// XXH3 digest of the file's index, 128 bits: 32 hexadecimal digits.
    pub(super) digest: String,
    /// Numbers of the shards, in the order in which they lie in the file.
    pub(super) shards: Vec<u32>,
    /// Name of the checkpoint, in the same folder, since which the file has the changes; `None`: it
    /// has all rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) base: Option<String>,
}

impl TableRows {
    /// `of_ranks`: the shards that each rank has written.
    pub(super) fn new(
        fingerprint: &JobFingerprint,
        parts: &[Written],
        of_ranks: &[Vec<u32>],
    ) -> Self {
        Self {
            tables: fingerprint.tables.clone(),
            seed: fingerprint.seed,
            shards: SHARDS,
            touches: parts.iter().filter_map(|part| part.rows).map(|rows| rows.touches).sum(),
            files: RowsFile::of_ranks(fingerprint, parts, of_ranks),
            chain: Chain::default(),
        }
    }

    /// Names of the checkpoints since which files have the changes.
    pub(super) fn bases(&self) -> BTreeSet<&str> {
        self.files.iter().filter_map(|file| file.base.as_deref()).collect()
    }

    /// Appends this checkpoint to the chains of its [bases](Self::bases).
    pub(super) fn append_to(&mut self, bases: &[Self]) {
        let bytes = self.files.iter().map(|file| file.bytes).sum();
        self.chain = Chain { whole_bytes: bytes, ..Chain::default() };
        for Self { chain: base, .. } in bases {
            let changed_bytes = base.changed_bytes.saturating_add(bytes);
            self.chain = Chain {
                changes: self.chain.changes.max(base.changes + 1),
                whole_bytes: base.whole_bytes,
                changed_bytes: self.chain.changed_bytes.max(changed_bytes),
            };
        }
    }

    /// Whether the next checkpoint may have the changes since this one: up to [`CHANGES_MAX`]
    /// follow each other, until they are half as large as all rows.
    pub(super) fn may_be_base(&self) -> bool {
        let Chain { changes, whole_bytes, changed_bytes } = self.chain;
        changes < CHANGES_MAX && changed_bytes <= whole_bytes / 2
    }

    /// Checks that each shard lies in one file.
    pub(super) fn check(&self) -> Result<(), String> {
        elasticdl_tables::check(&self.tables)?;
        if self.shards != SHARDS {
            return Err(format!("its tables have {} shards, not {SHARDS}", self.shards));
        }
        if self.chain.changes > CHANGES_MAX {
            return Err(format!("{} changes of rows follow each other", self.chain.changes));
        }
        if let Some(base) = self.bases().into_iter().find(|base| Name::parse(base).is_none()) {
            return Err(format!("its rows are changes since {base:?}, which is no checkpoint"));
        }
        check_files(&self.files, SHARDS.into())
    }

    /// Checks that a job's rows can go on from these.
    pub(super) fn check_job(&self, fingerprint: &JobFingerprint) -> Result<(), String> {
        if let Some(difference) = elasticdl_tables::difference(&self.tables, &fingerprint.tables) {
            return Err(format!("{difference}; both must have the same tables"));
        }
        if self.seed != fingerprint.seed {
            let (had, has) = (self.seed, fingerprint.seed);
            return Err(format!(
                "the rows of its tables began with --seed {had}, and this job has --seed {has}; \
                 give --seed {had}"
            ));
        }
        Ok(())
    }
}

/// Most checkpoints with changes that follow one with all rows. One that is damaged takes those
/// after it along.
const CHANGES_MAX: u32 = 8;

impl RowsFile {
    /// The files that the ranks have written, each with the shards of this list.
    pub(super) fn of_ranks(
        fingerprint: &JobFingerprint,
        parts: &[Written],
        of_ranks: &[Vec<u32>],
    ) -> Vec<Self> {
        let rows = parts.iter().map(|part| part.rows.expect("each rank has written its shards"));
        let file = |(rank, (rows, shards)): (usize, (WrittenRows, &Vec<u32>))| Self {
            file: name::rows(rank, parts.len()),
            bytes: rows.bytes,
            digest: format!("{:032x}", rows.digest),
            shards: shards.clone(),
            base: rows.base.map(|(step, generation)| {
                Name { step, generation, run: fingerprint.run.clone() }.to_string()
            }),
        };
        rows.zip(of_ranks).enumerate().map(file).collect()
    }
}

/// Checks that each of so many shards lies in one file.
pub(super) fn check_files(files: &[RowsFile], number: u64) -> Result<(), String> {
    let listed: usize = files.iter().map(|file| file.shards.len()).sum();
    if listed as u64 > number {
        return Err(format!("its files contain {listed} shards, not {number}"));
    }
    let mut found = vec![false; listed];
    for RowsFile { file, bytes, shards, .. } in files {
        if *bytes < shards.len() as u64 * ENTRY_BYTES {
            return Err(format!("{file} contains {} shards in {bytes} bytes", shards.len()));
        }
        for &shard in shards {
            let found = found.get_mut(shard as usize);
            if found.is_none_or(|found| std::mem::replace(found, true)) {
                return Err(format!("{file} contains shard {shard}, which it can't"));
            }
        }
    }
    match listed as u64 == number {
        true => Ok(()),
        false => Err(format!("no file contains shard {listed}")),
    }
}

/// Bytes of a shard in the index of a file.
pub(super) const ENTRY_BYTES: u64 = 24;
