//! What a manifest says of an optimizer's state that is divided into chunks, and how a worker reads
//! its chunks from any checkpoint.

use elasticdl_data::storage::Storage;
use elasticdl_tables::{ChunkLayout, SavedChunk};

use super::load::{LoadError, read_tensors};
use super::manifest::{JobFingerprint, Manifest};
use super::rows;
use super::table_rows::ChunkedSlots;

impl ChunkedSlots {
    /// Reads what is wanted of the chunks: the parameters, if they are there, and the optimizer's
    /// state, `[slots, parameters]`.
    pub(super) fn read(
        &self,
        folder: &Storage,
        manifest: &Manifest,
        parameters: Option<&mut [f32]>,
        mut slots: Option<&mut [f32]>,
    ) -> Result<(), LoadError> {
        let mut parameters = parameters.filter(|_| self.has_parameters);
        if parameters.is_none() && slots.is_none() {
            return Ok(());
        }
        let layout = self.layout(manifest.parameters as usize, manifest.slots as usize);
        rows::read_chunks(folder, &self.files, &|_| true, &mut |chunk, bytes| {
            let saved = decode(&layout, chunk, bytes)?;
            let range = layout.range(chunk);
            let first = if self.has_parameters { range.len() } else { 0 };
            let (of_parameters, of_slots) = saved.slots().split_at(first);
            if let Some(parameters) = &mut parameters {
                parameters[range].copy_from_slice(of_parameters);
            }
            if let Some(slots) = &mut slots {
                layout.paste(chunk, of_slots, slots);
            }
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
    let (layout, has_parameters) = (fingerprint.layout(), fingerprint.chunks_have_parameters);
    let is_same = |saved: &&ChunkedSlots| {
        saved.chunk_len == layout.chunk_len as u64 && saved.has_parameters == has_parameters
    };
    let mut chunks = Vec::new();
    if manifest.lies_elsewhere(fingerprint).map_err(LoadError::Refused)? {
        let mut divided = vec![0.0; fingerprint.slots - fingerprint.whole];
        manifest.read_parts(folder, fingerprint, None, (0, &mut divided))?;
        return Ok(wanted.iter().map(|&chunk| layout.cut(chunk, &divided)).collect());
    }
    match manifest.optimizer.as_ref().filter(is_same) {
        Some(saved) => {
            let take = &mut |chunk, bytes: &[u8]| {
                chunks.push(decode(&layout, chunk, bytes)?);
                Ok(())
            };
            rows::read_chunks(folder, &saved.files, &|chunk| wanted.contains(&chunk), take)?;
        }
        None => {
            let first = if has_parameters { fingerprint.parameters } else { 0 };
            let mut state = vec![0.0; first + fingerprint.slots];
            let (parameters, slots) = state.split_at_mut(first);
            let parameters = Some(parameters).filter(|_| has_parameters);
            read_tensors(folder, manifest, parameters, Some(slots))?;
            chunks.extend(wanted.iter().map(|&chunk| layout.cut(chunk, &state)));
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
