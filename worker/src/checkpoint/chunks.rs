//! What a manifest says of an optimizer's state that is divided into chunks, and how a worker reads
//! its chunks from any checkpoint.

use elasticdl_data::storage::Storage;
use elasticdl_tables::{ChunkLayout, SavedChunk};

use super::load::{LoadError, read_tensors};
use super::manifest::{JobFingerprint, Manifest};
use super::rows;
use super::table_rows::ChunkedSlots;

impl ChunkedSlots {
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
