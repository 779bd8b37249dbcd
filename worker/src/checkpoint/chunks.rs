//! What a manifest says of an optimizer's state that is divided into chunks, and how a worker reads
//! its chunks from any checkpoint.

use elasticdl_data::storage::Storage;
use elasticdl_tables::{ChunkLayout, SavedChunk};
use serde::{Deserialize, Serialize};

use super::load::{LoadError, read_tensors};
use super::manifest::{JobFingerprint, Manifest};
use super::rows;
use super::table_rows::{RowsFile, check_files};
use crate::session::checkpoint::Written;

/// The optimizer's state in chunks of the parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ChunkedSlots {
    /// Number of parameters of a chunk; the last one may have fewer.
    pub(super) chunk_len: u64,
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
        Self { chunk_len, files: RowsFile::of_ranks(fingerprint, parts, of_ranks) }
    }

    /// Checks that each chunk of a state of this size lies in one file.
    pub(super) fn check(&self, parameters: u64, slots: u64) -> Result<(), String> {
        if self.chunk_len == 0 || !slots.is_multiple_of(parameters.max(1)) {
            return Err(format!("its optimizer has chunks of {} parameters", self.chunk_len));
        }
        check_files(&self.files, parameters.div_ceil(self.chunk_len).max(1))
    }

    fn layout(&self, parameters: usize, slots: usize) -> ChunkLayout {
        let chunk_len = self.chunk_len as usize;
        ChunkLayout { parameters, slots: slots / parameters.max(1), chunk_len }
    }

    /// Reads the whole state of the optimizer, `[slots, parameters]`.
    pub(super) fn read(
        &self,
        folder: &Storage,
        parameters: usize,
        slots: &mut [f32],
    ) -> Result<(), LoadError> {
        let layout = self.layout(parameters, slots.len());
        rows::read_chunks(folder, &self.files, &|_| true, &mut |chunk, bytes| {
            let saved = decode(&layout, chunk, bytes)?;
            layout.paste(chunk, saved.slots(), slots);
            Ok(())
        })
    }
}

/// Reads these chunks of a job's optimizer from a checkpoint, in which its state may be divided in
/// the same way, in another one, or not at all.
pub(super) fn read(
    folder: &Storage,
    fingerprint: &JobFingerprint,
    manifest: &Manifest,
    wanted: &[u32],
) -> Result<Vec<SavedChunk>, LoadError> {
    let layout = fingerprint.layout();
    let mut chunks = Vec::new();
    match &manifest.optimizer {
        Some(saved) if saved.chunk_len == layout.chunk_len as u64 => {
            let take = &mut |chunk, bytes: &[u8]| {
                chunks.push(decode(&layout, chunk, bytes)?);
                Ok(())
            };
            rows::read_chunks(folder, &saved.files, &|chunk| wanted.contains(&chunk), take)?;
        }
        _ => {
            let mut slots = vec![0.0; fingerprint.slots];
            read_tensors(folder, manifest, None, Some(&mut slots))?;
            chunks.extend(wanted.iter().map(|&chunk| layout.cut(chunk, &slots)));
        }
    }
    Ok(chunks)
}

fn decode(layout: &ChunkLayout, chunk: u32, bytes: &[u8]) -> Result<SavedChunk, String> {
    let saved = layout.decode(chunk, bytes).map_err(|error| error.reason().to_owned())?;
    match saved.is_finite() {
        true => Ok(saved),
        false => Err(format!("chunk {chunk} contains a NaN or an infinity")),
    }
}
