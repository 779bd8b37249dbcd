//! What a manifest says of the rows of a model's tables.

use elasticdl_tables::{SHARDS, Table};
use serde::{Deserialize, Serialize};

use super::manifest::JobFingerprint;
use super::name;
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
}

impl TableRows {
    /// `of_ranks`: the shards that each rank has written.
    pub(super) fn new(
        fingerprint: &JobFingerprint,
        parts: &[Written],
        of_ranks: &[Vec<u32>],
    ) -> Self {
        let rows = || parts.iter().map(|part| part.rows.expect("each rank has written its rows"));
        let file = |(rank, (rows, shards)): (usize, (WrittenRows, &Vec<u32>))| RowsFile {
            file: name::rows(rank, parts.len()),
            bytes: rows.bytes,
            digest: format!("{:032x}", rows.digest),
            shards: shards.clone(),
        };
        Self {
            tables: fingerprint.tables.clone(),
            seed: fingerprint.seed,
            shards: SHARDS,
            touches: rows().map(|rows| rows.touches).sum(),
            files: rows().zip(of_ranks).enumerate().map(file).collect(),
        }
    }

    /// Checks that each shard lies in one file.
    pub(super) fn check(&self) -> Result<(), String> {
        elasticdl_tables::check(&self.tables)?;
        if self.shards != SHARDS {
            return Err(format!("its tables have {} shards, not {SHARDS}", self.shards));
        }
        let mut found = [false; SHARDS as usize];
        for RowsFile { file, bytes, shards, .. } in &self.files {
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
        match found.iter().position(|found| !found) {
            Some(missing) => Err(format!("no file contains shard {missing}")),
            None => Ok(()),
        }
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

/// Bytes of a shard in the index of a file.
pub(super) const ENTRY_BYTES: u64 = 24;
