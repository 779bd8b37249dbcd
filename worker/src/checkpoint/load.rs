//! Finds the newest complete checkpoint and loads the state from it.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use elasticdl_data::storage::{Storage, StorageError};
use elasticdl_tables::SavedChunk;
use xxhash_rust::xxh3::Xxh3Default;

use super::chunks;
use super::manifest::{JobFingerprint, Manifest, Shard};
use super::name::{MANIFEST, Name, PREFIX};
use super::rows::{self, TakeShard};
use crate::session::header::StateRecord;
use crate::tensors::is_finite;

/// Storage locations of checkpoints.
#[derive(Clone, Debug)]
pub(crate) struct Locations {
    /// Checkpoints of this run, and the destination of new ones.
    pub(crate) own: Option<Storage>,
    /// Source of a new run's initial state: a checkpoint, or a folder of checkpoints.
    pub(crate) from: Option<Storage>,
    /// `own` belongs to this job alone, so it may contain checkpoints of the job's earlier runs.
    pub(crate) exclusive: bool,
    /// Checkpoints whose rows a worker could not read, by address, and why.
    pub(crate) passed_over: Vec<(String, String)>,
}

impl Locations {
    /// The folder of a checkpoint of this `name`, if it exists. `same_run`: whether this run wrote
    /// it.
    fn folder(&self, (name, same_run): (&str, bool)) -> Result<Option<Storage>, RestoreError> {
        match (same_run, &self.own, &self.from) {
            (true, Some(own), _) => Ok(Some(own.join(name))),
            (false, _, Some(from)) if is_checkpoint(from).map_err(unavailable)? => {
                Ok(Some(from.clone()))
            }
            (false, _, Some(from)) => Ok(Some(from.join(name))),
            _ => Ok(None),
        }
    }

    /// Refuses the checkpoint in `folder` if it is passed over.
    fn check_passed_over(&self, folder: &Storage) -> Result<(), LoadError> {
        let mut passed_over = self.passed_over.iter();
        match passed_over.find(|(address, _)| address == folder.address()) {
            Some((_, reason)) => Err(LoadError::Damaged(reason.clone())),
            None => Ok(()),
        }
    }

    /// No state is restored from this checkpoint any more, for this reason.
    pub(crate) fn pass_over(&mut self, checkpoint: (&str, bool), reason: &str) {
        if let Ok(Some(folder)) = self.folder(checkpoint) {
            self.passed_over.push((folder.address().to_owned(), reason.to_owned()));
        }
    }
}

/// A state that was loaded from a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Restored {
    /// The state, without its tensors.
    pub state: StateRecord,
    /// Name of the checkpoint.
    pub name: String,
    /// Whether this run wrote the checkpoint.
    pub same_run: bool,
    /// What differs between the program that wrote it and this one.
    pub differences: Vec<String>,
}

/// Reason that no state could be loaded.
#[derive(Debug, PartialEq)]
pub enum RestoreError {
    /// No worker can load a state from here; the text says what is wrong and what the user should
    /// do.
    Refused(String),
    /// The storage does not answer correctly; a later attempt may succeed.
    Storage(String),
}

/// Loads the newest complete checkpoint into `parameters` and `slots`. Without one, these hold
/// unspecified values and the result is `None`: the job starts from its initial model. `damaged` is
/// called for each damaged checkpoint, with the reason.
pub(crate) fn restore(
    locations: &Locations,
    fingerprint: &JobFingerprint,
    parameters: &mut [f32],
    slots: &mut [f32],
    damaged: &mut dyn FnMut(&str, &str),
) -> Result<Option<Restored>, RestoreError> {
    let mut take = |folder: &Storage, is_new_job| {
        locations.check_passed_over(folder)?;
        load(folder, fingerprint, &mut *parameters, &mut *slots, is_new_job)
    };
    search(locations, fingerprint, &mut take, damaged)
}

/// The newest complete checkpoint of at most `step` steps: its name, and whether this run wrote it.
/// Reads no tensors. `damaged` is called as by [`restore`].
pub(crate) fn newest(
    locations: &Locations,
    fingerprint: &JobFingerprint,
    step: u64,
    damaged: &mut dyn FnMut(&str, &str),
) -> Result<Option<(String, bool)>, RestoreError> {
    let mut take = |folder: &Storage, is_new_job| {
        locations.check_passed_over(folder)?;
        let manifest = compatible_manifest(folder, fingerprint, is_new_job)?;
        if manifest.state.step > step {
            return Err(LoadError::Damaged(format!(
                "it is of step {}, and the group is at step {step}",
                manifest.state.step
            )));
        }
        if let Some(tables) = &manifest.rows {
            rows::check(folder, tables)?;
        }
        Ok(manifest)
    };
    let found = search(locations, fingerprint, &mut take, damaged)?;
    Ok(found.map(|found| (found.name, found.same_run)))
}

/// Reads the rows of these shards from a checkpoint of this `name` that another rank has restored,
/// and gives each to `take`. `same_run`: whether this run wrote it.
pub(crate) fn read_rows(
    locations: &Locations,
    fingerprint: &JobFingerprint,
    checkpoint: (&str, bool),
    shards: &[u32],
    take: &mut TakeShard<'_>,
) -> Result<(), RestoreError> {
    let folder = named(locations, checkpoint)?;
    let mut read = || {
        let manifest = compatible_manifest(&folder, fingerprint, false)?;
        match &manifest.rows {
            Some(rows) => rows::read(&folder, rows, &|shard| shards.contains(&shard), take),
            None => Ok(()),
        }
    };
    read().map_err(|error| refused(&folder, error))
}

/// Reads these chunks of the optimizer's state from a checkpoint of this `name` that another rank
/// has restored. `same_run`: whether this run wrote it.
pub(crate) fn read_chunks(
    locations: &Locations,
    fingerprint: &JobFingerprint,
    checkpoint: (&str, bool),
    wanted: &[u32],
) -> Result<Vec<SavedChunk>, RestoreError> {
    let folder = named(locations, checkpoint)?;
    let read = || {
        let manifest = compatible_manifest(&folder, fingerprint, false)?;
        chunks::read(&folder, fingerprint, &manifest, wanted)
    };
    read().map_err(|error| refused(&folder, error))
}

/// The folder of a checkpoint of this name, which is there.
fn named(locations: &Locations, checkpoint: (&str, bool)) -> Result<Storage, RestoreError> {
    let missing = || RestoreError::Refused(format!("this worker knows no {}", checkpoint.0));
    locations.folder(checkpoint)?.ok_or_else(missing)
}

fn refused(folder: &Storage, error: LoadError) -> RestoreError {
    match error {
        LoadError::Damaged(reason) | LoadError::Refused(reason) => {
            RestoreError::Refused(format!("{folder}: {reason}"))
        }
        LoadError::Storage(error) => unavailable(error),
    }
}

/// Checks that [`restore`] would find a checkpoint for a new job, or that none is requested. Reads
/// only manifests.
pub(crate) fn check(
    locations: &Locations,
    fingerprint: &JobFingerprint,
) -> Result<(), RestoreError> {
    let mut take =
        |folder: &Storage, is_new_job| compatible_manifest(folder, fingerprint, is_new_job);
    search(locations, fingerprint, &mut take, &mut |_, _| {}).map(drop)
}

fn search(
    locations: &Locations,
    fingerprint: &JobFingerprint,
    take: &mut dyn FnMut(&Storage, bool) -> Result<Manifest, LoadError>,
    damaged: &mut dyn FnMut(&str, &str),
) -> Result<Option<Restored>, RestoreError> {
    let restored = |manifest: &Manifest, name: String, same_run| Restored {
        state: manifest.state_for(fingerprint, same_run),
        name,
        same_run,
        differences: manifest.differences(fingerprint),
    };
    if let Some(own) = &locations.own {
        let names = names(own)?;
        let mut ours: Vec<&Name> =
            names.iter().filter(|name| name.run == fingerprint.run).collect();
        // A later generation may have begun at an earlier step.
        ours.sort_by_key(|name| Reverse((name.generation, name.step)));
        let mut found = false;
        for name in ours {
            found = true;
            let folder = own.join(&name.to_string());
            let loaded = take(&folder, false);
            if let Some(manifest) = accept(loaded, &name.to_string(), damaged)? {
                return Ok(Some(restored(&manifest, name.to_string(), true)));
            }
        }
        if let Some(other) =
            names.last().filter(|_| !found && locations.from.is_none() && !locations.exclusive)
        {
            return Err(RestoreError::Refused(format!(
                "{own} contains checkpoints of another job, the latest of which is {other}; to \
                 resume from it, add --resume-from {own}; to start anew, choose another \
                 --checkpoint-dir"
            )));
        }
    }
    let Some(from) = &locations.from else { return Ok(None) };
    let mut reasons = Vec::new();
    let mut damaged = |name: &str, reason: &str| {
        reasons.push(format!("{name}: {reason}"));
        damaged(name, reason);
    };
    for (name, folder) in newest_first(from, &mut damaged)? {
        let loaded = take(&folder, true);
        if let Some(manifest) = accept(loaded, &name, &mut damaged)? {
            return Ok(Some(restored(&manifest, name, false)));
        }
    }
    Err(RestoreError::Refused(no_checkpoint(from, &reasons)))
}

/// Says that a job can't begin with a checkpoint in `from`. `reasons`: why those that are there are
/// damaged.
fn no_checkpoint(from: &Storage, reasons: &[String]) -> String {
    let address = from.address();
    if !address.contains("://") && !Path::new(address).exists() {
        return format!("no complete checkpoint in {from}: there is no such folder");
    }
    if address.ends_with(".safetensors") {
        return format!(
            "{from} is a model file, not a checkpoint: it lacks the optimizer's state and the \
             position in the data; name the folder of a job's checkpoints"
        );
    }
    let more = match reasons.len() {
        0 | 1 => String::new(),
        len => format!("; {} more are damaged", len - 1),
    };
    let first = reasons.first().map(|reason| format!(": {reason}{more}")).unwrap_or_default();
    format!("no complete checkpoint in {from}{first}")
}

/// Checkpoints in a folder.
#[derive(Debug, PartialEq)]
pub(crate) enum CheckpointLookup {
    NotFound,
    /// The folder is a checkpoint itself.
    Single,
    /// The folder contains complete checkpoints; the name of the one with the most steps.
    Several(String),
}

/// Finds out what `folder` contains, from file names only.
///
/// # Errors
/// An error of the storage.
pub(crate) fn inspect(folder: &Storage) -> Result<CheckpointLookup, StorageError> {
    if is_checkpoint(folder)? {
        return Ok(CheckpointLookup::Single);
    }
    let files = folder.list_folders(PREFIX)?;
    let latest = Name::all(&files).into_iter().rev().find(|(_, is_complete)| *is_complete);
    Ok(latest.map_or(CheckpointLookup::NotFound, |(name, _)| {
        CheckpointLookup::Several(name.to_string())
    }))
}

/// Reads only the parameters, `[parameters]`, of the checkpoint in `folder`.
///
/// # Errors
/// An error of the storage, a damaged shard, or a checkpoint of another model.
pub(crate) fn load_parameters(folder: &Storage, parameters: &mut [f32]) -> Result<(), String> {
    read_parameters(folder, parameters).map_err(|error| match error {
        LoadError::Damaged(reason) | LoadError::Refused(reason) => format!("{folder}: {reason}"),
        LoadError::Storage(error) => error.to_string(),
    })
}

fn read_parameters(folder: &Storage, parameters: &mut [f32]) -> Result<(), LoadError> {
    let manifest = manifest(folder)?;
    let parameter_count = parameters.len();
    if manifest.parameters != parameter_count as u64 {
        let had = manifest.parameters;
        return Err(LoadError::Refused(format!(
            "its model has {had} parameters, and this one has {parameter_count}"
        )));
    }
    read_tensors(folder, &manifest, Some(parameters), None)
}

/// Whether `folder` is a checkpoint itself.
pub(crate) fn is_checkpoint(folder: &Storage) -> Result<bool, StorageError> {
    match folder.bytes(MANIFEST) {
        Ok(_) => Ok(true),
        Err(StorageError::NotFound { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Complete checkpoints in `folder`, those with the fewest steps first.
fn names(folder: &Storage) -> Result<Vec<Name>, RestoreError> {
    let files = folder.list_folders(PREFIX).map_err(unavailable)?;
    Ok(Name::all(&files)
        .into_iter()
        .filter(|(_, is_complete)| *is_complete)
        .map(|(name, _)| name)
        .collect())
}

/// The checkpoint that `from` is, or the checkpoints in it, newest first. Within a run, later
/// generations wrote later checkpoints, and later steps of one generation. Runs are ordered by the
/// time at which their newest checkpoint was written.
fn newest_first(
    from: &Storage,
    damaged: &mut dyn FnMut(&str, &str),
) -> Result<Vec<(String, Storage)>, RestoreError> {
    if is_checkpoint(from).map_err(unavailable)? {
        let name = Path::new(from.address())
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        return Ok(vec![(name, from.clone())]);
    }
    let mut found = Vec::new();
    for name in names(from)? {
        let folder = from.join(&name.to_string());
        match manifest(&folder) {
            Ok(manifest) => found.push((manifest.written_at, name)),
            Err(LoadError::Damaged(reason)) => damaged(&name.to_string(), &reason),
            Err(LoadError::Refused(reason)) => return Err(RestoreError::Refused(reason)),
            Err(LoadError::Storage(error)) => return Err(unavailable(error)),
        }
    }
    let (found, is_disordered) = order_newest_first(found);
    if let (true, Some(newest)) = (is_disordered, found.first()) {
        tracing::warn!(
            %from,
            %newest,
            "the clocks of the workers that wrote these checkpoints disagree with the order of \
             their generations and steps; the order counts"
        );
    }
    let folder = |name: Name| (name.to_string(), from.join(&name.to_string()));
    Ok(found.into_iter().map(folder).collect())
}

/// Orders checkpoints, each with its time of writing, newest first. Also returns whether the times
/// within a run disagree with that order.
fn order_newest_first(found: Vec<(u64, Name)>) -> (Vec<Name>, bool) {
    let mut runs: BTreeMap<String, Vec<(u64, Name)>> = BTreeMap::new();
    for (written_at, name) in found {
        runs.entry(name.run.clone()).or_default().push((written_at, name));
    }
    let mut runs: Vec<_> = runs.into_values().collect();
    for run in &mut runs {
        run.sort_by_key(|(_, name)| Reverse((name.generation, name.step)));
    }
    let is_disordered = runs.iter().any(|run| run.windows(2).any(|pair| pair[0].0 < pair[1].0));
    runs.sort_by_key(|run| Reverse(run.first().map(|(written_at, name)| (*written_at, name.step))));
    (runs.into_iter().flatten().map(|(_, name)| name).collect(), is_disordered)
}

#[derive(Debug)]
pub(super) enum LoadError {
    Damaged(String),
    Refused(String),
    Storage(StorageError),
}

/// Evaluates a load attempt: a manifest, or `None` if the next checkpoint is to be tried.
fn accept(
    loaded: Result<Manifest, LoadError>,
    name: &str,
    damaged: &mut dyn FnMut(&str, &str),
) -> Result<Option<Manifest>, RestoreError> {
    match loaded {
        Ok(manifest) => Ok(Some(manifest)),
        Err(LoadError::Damaged(reason)) => {
            damaged(name, &reason);
            Ok(None)
        }
        Err(LoadError::Refused(reason)) => {
            Err(RestoreError::Refused(format!("this job cannot resume from {name}: {reason}")))
        }
        Err(LoadError::Storage(error)) => Err(unavailable(error)),
    }
}

fn unavailable(error: StorageError) -> RestoreError {
    RestoreError::Storage(error.to_string())
}

/// Reads the manifest of the checkpoint in `folder`.
pub(super) fn manifest(folder: &Storage) -> Result<Manifest, LoadError> {
    let bytes = folder.read(MANIFEST).map_err(LoadError::Storage)?;
    Manifest::decode(&bytes).map_err(|reason| LoadError::Damaged(format!("{MANIFEST}: {reason}")))
}

/// Reads the manifest and checks that this job can resume from it.
fn compatible_manifest(
    folder: &Storage,
    fingerprint: &JobFingerprint,
    is_new_job: bool,
) -> Result<Manifest, LoadError> {
    let manifest = manifest(folder)?;
    manifest.check_model_and_data(fingerprint).map_err(LoadError::Refused)?;
    if is_new_job {
        manifest.check_options(fingerprint).map_err(LoadError::Refused)?;
    }
    Ok(manifest)
}

pub(super) fn load(
    folder: &Storage,
    fingerprint: &JobFingerprint,
    parameters: &mut [f32],
    slots: &mut [f32],
    is_new_job: bool,
) -> Result<Manifest, LoadError> {
    let manifest = compatible_manifest(folder, fingerprint, is_new_job)?;
    // A worker with a sharded optimizer reads its chunks when its group knows who holds which.
    let wants_slots = !fingerprint.shards_optimizer;
    let wanted = Some(&mut *slots).filter(|_| wants_slots || fingerprint.whole > 0);
    match wanted {
        Some(slots) if manifest.lies_elsewhere(fingerprint).map_err(LoadError::Refused)? => {
            let first = fingerprint.slots - slots.len();
            manifest.read_parts(folder, fingerprint, Some(&mut *parameters), (first, slots))?;
        }
        wanted => read_tensors(folder, &manifest, Some(&mut *parameters), wanted)?,
    }
    if let Some(chunked) = manifest.optimizer.as_ref().filter(|_| !wants_slots) {
        rows::check_chunks(folder, &chunked.files)?;
    }
    if !(is_finite(parameters) && is_finite(slots)) {
        return Err(LoadError::Damaged("it contains a NaN or an infinity".into()));
    }
    if let Some(tables) = &manifest.rows {
        rows::check(folder, tables)?;
    }
    Ok(manifest)
}

/// Reads the parameters and the optimizer's state, or one of them, from the shards and chunks that
/// have some of it.
pub(super) fn read_tensors(
    folder: &Storage,
    manifest: &Manifest,
    mut parameters: Option<&mut [f32]>,
    slots: Option<&mut [f32]>,
) -> Result<(), LoadError> {
    let chunked = manifest.optimizer.as_ref();
    // Chunks have the first floats, and shards what is not divided.
    let whole = |all: usize| chunked.map_or(all, |chunked| all.min(chunked.whole as usize));
    let (divided, mut slots) = slots.map(|s| s.split_at_mut(s.len() - whole(s.len()))).unzip();
    let mut unwanted = [Vec::new(), Vec::new()];
    for shard in &manifest.shards {
        let (of_parameters, of_slots) = shard.split(manifest.parameters as usize);
        let is_wanted = (parameters.is_some() && !of_parameters.is_empty())
            || (slots.is_some() && !of_slots.is_empty());
        if !is_wanted {
            continue;
        }
        // Before memory is allocated for what the manifest declares.
        check_size(folder, shard)?;
        let [first, second] = &mut unwanted;
        let floats =
            [target(&mut parameters, of_parameters, first), target(&mut slots, of_slots, second)];
        read_shard(folder, shard, floats)?;
    }
    let divided = divided.filter(|divided| !divided.is_empty());
    chunked.map_or(Ok(()), |chunked| chunked.read(folder, manifest, parameters, divided))
}

/// Where a range of a tensor goes, if it is wanted.
fn target<'a>(
    tensor: &'a mut Option<&mut [f32]>,
    range: Range<usize>,
    unwanted: &'a mut Vec<f32>,
) -> &'a mut [f32] {
    match tensor {
        Some(tensor) => &mut tensor[range],
        None => {
            unwanted.resize(range.len(), 0.0);
            unwanted
        }
    }
}

/// Checks that a shard is as long as the manifest declares.
pub(super) fn check_size(folder: &Storage, shard: &Shard) -> Result<(), LoadError> {
    let damaged = |reason: &str| LoadError::Damaged(format!("{}: {reason}", shard.file));
    match folder.bytes(&shard.file) {
        Ok(bytes) if bytes == shard.bytes => Ok(()),
        Ok(bytes) => Err(damaged(&format!("it has {bytes} bytes, not {}", shard.bytes))),
        Err(StorageError::NotFound { .. }) => Err(damaged("it is missing")),
        Err(error) => Err(LoadError::Storage(error)),
    }
}

/// Reads a shard in pieces and verifies its digest.
fn read_shard(folder: &Storage, shard: &Shard, floats: [&mut [f32]; 2]) -> Result<(), LoadError> {
    let damaged = |reason: &str| LoadError::Damaged(format!("{}: {reason}", shard.file));
    check_size(folder, shard)?;
    let mut targets = floats.map(bytemuck::cast_slice_mut::<f32, u8>);
    let data: usize = targets.iter().map(|target| target.len()).sum();
    let mut header = shard.bytes - data as u64;
    let (mut digest, mut at) = (Xxh3Default::new(), 0);
    while at < shard.bytes {
        let end = shard.bytes.min(at + PIECE_BYTES);
        let piece = folder.read_range(&shard.file, at..end).map_err(LoadError::Storage)?;
        if piece.len() as u64 != end - at {
            return Err(damaged("it became shorter while it was being read"));
        }
        digest.update(&piece);
        let skipped = header.min(piece.len() as u64);
        header -= skipped;
        let mut rest = &piece[skipped as usize..];
        for target in &mut targets {
            let bytes = rest.len().min(target.len());
            let (now, later) = std::mem::take(target).split_at_mut(bytes);
            now.copy_from_slice(&rest[..now.len()]);
            rest = &rest[now.len()..];
            *target = later;
        }
        at = end;
    }
    if format!("{:032x}", digest.digest128()) != shard.digest {
        return Err(damaged("its digest does not match: it has changed"));
    }
    Ok(())
}

/// Bytes of a shard that are in memory in addition to the state.
const PIECE_BYTES: u64 = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_of_a_run_are_ordered_by_generation_and_step_and_runs_by_their_newest() {
        let name = |run: &str, generation, step| Name { run: run.into(), generation, step };
        // The clock of `a` was set back by two hours after step 40; `b` was rolled back to step 10.
        let a = [(9000, name("a", 1, 40)), (2000, name("a", 1, 80)), (2100, name("a", 2, 200))];
        let b = [(2500, name("b", 1, 90)), (2600, name("b", 2, 20))];
        let (ordered, is_disordered) = order_newest_first([&a[..], &b[..]].concat());
        let expected = [&b[1], &b[0], &a[2], &a[1], &a[0]].map(|(_, name)| name.clone());
        assert_eq!((&*ordered, is_disordered), (&expected[..], true));
        assert!(!order_newest_first(b.to_vec()).1);
        assert_eq!(order_newest_first(Vec::new()), (Vec::new(), false));
    }
}
