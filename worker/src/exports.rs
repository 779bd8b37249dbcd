//! Exports of a training job: the model at its end, and the best one of its evaluations.
//!
//! **Invariants:** an export that fails does not end training. At the end of a job it is repeated
//! for some time, with the model in the job's directory meanwhile. A job that fails does not
//! replace a file that a good job has written: its model lies beside it, under another name. Nor
//! does a job destroy a best model that is better than its own: that is kept as `NAME.previous`,
//! which the note in the job's own file says, so that any later exporter can report it.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use elasticdl_data::storage::{Storage, StorageError};
use elasticdl_data::worker::with_patience;
use elasticdl_proto::{Kept, failed_export};
use serde::{Deserialize, Serialize};

use crate::checkpoint::BestMetric;
use crate::exported_tables::{self, ExportedTables};
use crate::model::NamedTensor;
use crate::paths::{self, PREVIOUS};
use crate::weights::{self, WeightsError};

/// Where a job exports models, and the best one as long as it is not written.
#[derive(Debug)]
pub(crate) struct Exports {
    places: ExportPlaces,
    layout: Vec<NamedTensor>,
    unsaved_best: Option<(Best, Arc<Vec<f32>>)>,
    /// What this job's best models have replaced, once that is known.
    kept: RefCell<Option<Option<Kept>>>,
}

/// Writes the rows of the model's tables that belong to the model at an address, before its file.
/// Returns what the file says of them; `None`: the model has no tables.
pub(crate) type WriteRows<'a> = &'a dyn Fn(&str) -> Result<Option<ExportedTables>, WeightsError>;

/// A model to be written.
#[derive(Clone, Copy)]
pub(crate) struct Model<'a> {
    pub(crate) parameters: &'a Arc<Vec<f32>>,
    pub(crate) rows: WriteRows<'a>,
}

/// How long a failed export is repeated.
#[derive(Clone, Copy)]
pub(crate) struct Patience<'a> {
    pub(crate) limit: Duration,
    /// Sleeps for the given time. Returns whether only one attempt is left: the job stops.
    pub(crate) sleep: &'a dyn Fn(Duration) -> bool,
}

/// Addresses of exported models.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExportPlaces {
    /// The model at the end of the job.
    pub(crate) last: Option<String>,
    /// The best model so far, and what decides that.
    pub(crate) best: Option<(String, BestMetric)>,
    /// Identity of the job's run.
    pub(crate) run: String,
    /// A folder of this machine that takes a model which its own place does not take.
    pub(crate) fallback: Option<PathBuf>,
}

/// What a job says of the best model that it exports, in a note in the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Best {
    pub(crate) step: u64,
    /// Mean of the metric over the validation data.
    pub(crate) value: f64,
    metric: BestMetric,
    /// The run of the job that wrote it.
    run: String,
    /// What the job's best models have replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept: Option<Kept>,
}

/// What became of the best model of `step`.
#[derive(Debug, PartialEq)]
pub(crate) struct SavedBest {
    pub(crate) step: u64,
    /// Where what was there before is kept, if that was no worse model; or the error of the store.
    pub(crate) kept: Result<Option<Kept>, String>,
}

impl Exports {
    pub(crate) fn new(places: ExportPlaces, layout: Vec<NamedTensor>) -> Self {
        Self { places, layout, unsaved_best: None, kept: RefCell::default() }
    }

    /// Whether the model at the end of the job is exported.
    pub(crate) fn has_last(&self) -> bool {
        self.places.last.is_some()
    }

    /// Whether the best model is exported.
    pub(crate) fn has_best(&self) -> bool {
        self.places.best.is_some()
    }

    /// Whether any model is exported.
    pub(crate) fn is_any(&self) -> bool {
        self.has_last() || self.has_best()
    }

    /// Whether a model that its place does not take is kept on this machine.
    pub(crate) fn has_fallback(&self) -> bool {
        self.places.fallback.is_some()
    }

    /// Exports the model of `step` at the end of the job, which `has_failed` or not. Repeats a
    /// failed attempt with `patience`.
    ///
    /// # Errors
    /// Why it is not at its place, and where it is.
    pub(crate) fn save_last(
        &self,
        step: u64,
        has_failed: bool,
        model: Model<'_>,
        patience: Patience<'_>,
    ) -> Result<(), String> {
        let Some(last) = &self.places.last else { return Ok(()) };
        let address = if has_failed { failed_export(last) } else { last.clone() };
        self.save_patiently((&address, LAST_FILE), None, step, model, patience)
            .map(drop)
            .map_err(|error| format!("the model of step {step} was not exported: {error}"))
    }

    /// Takes the model of `step`, which is the best so far by `value`. [`Exports::save_best`]
    /// writes it.
    pub(crate) fn take_best(&mut self, (step, value): (u64, f64), parameters: Arc<Vec<f32>>) {
        if let Some((_, metric)) = &self.places.best {
            let (metric, run) = (metric.clone(), self.places.run.clone());
            self.unsaved_best = Some((Best { step, value, metric, run, kept: None }, parameters));
        }
    }

    /// Whether the best model is not written yet.
    pub(crate) fn has_unsaved_best(&self) -> bool {
        self.unsaved_best.is_some()
    }

    /// The best model, if it is not written yet, can't be written any more.
    pub(crate) fn forget_unsaved_best(&mut self) {
        self.unsaved_best = None;
    }

    /// Whether the best model of an earlier job, of this step and value, is at the place of this
    /// job's best one.
    pub(crate) fn holds_best(&self, best: (u64, f64)) -> bool {
        self.found_best(best).is_some()
    }

    /// What became of the best model, of this step and value, if this job has written it, be it
    /// another worker or for another master.
    pub(crate) fn saved_best(&self, best: (u64, f64)) -> Option<SavedBest> {
        let found = self.found_best(best).filter(|found| found.run == self.places.run)?;
        Some(SavedBest { step: found.step, kept: Ok(found.kept) })
    }

    /// The model of this step and value, if it is at the place of the best one.
    fn found_best(&self, (step, value): (u64, f64)) -> Option<Best> {
        let (address, metric) = self.places.best.as_ref()?;
        let found = Best::read(address).ok()??;
        let is_same = found.step == step && found.value == value && found.metric == *metric;
        is_same.then_some(found)
    }

    /// Exports the best model, if it is not written yet. A failure keeps it for the next call.
    /// `None`: nothing was to be written.
    pub(crate) fn save_best(&mut self, rows: WriteRows<'_>) -> Option<SavedBest> {
        let (address, _) = self.places.best.as_ref()?;
        let (best, parameters) = self.unsaved_best.as_ref()?;
        let step = best.step;
        let kept = self.save(address, Some(best), step, Model { parameters, rows });
        if kept.is_ok() {
            self.unsaved_best = None;
        }
        Some(SavedBest { step, kept: kept.map_err(|error| error.to_string()) })
    }

    /// Like [`Exports::save_best`], at the end of the job: a failed attempt is repeated with
    /// `patience`.
    pub(crate) fn save_best_at_end(
        &mut self,
        rows: WriteRows<'_>,
        patience: Patience<'_>,
    ) -> Option<SavedBest> {
        let (address, _) = self.places.best.as_ref()?;
        let (best, parameters) = self.unsaved_best.take()?;
        let (step, file) = (best.step, (address.as_str(), BEST_FILE));
        let model = Model { parameters: &parameters, rows };
        let kept = self.save_patiently(file, Some(&best), step, model, patience);
        if kept.is_err() {
            self.unsaved_best = Some((best, parameters));
        }
        Some(SavedBest { step, kept })
    }

    /// Returns what the job's best models have replaced, if it is kept. `best`: this is the best
    /// model.
    fn save(
        &self,
        address: &str,
        best: Option<&Best>,
        step: u64,
        model: Model<'_>,
    ) -> Result<Option<Kept>, WeightsError> {
        let mut kept = None;
        if let Some(best) = best {
            let known = &mut *self.kept.borrow_mut();
            if known.is_none() {
                *known = Some(best.keep_better(address)?);
            }
            kept.clone_from(known.as_ref().expect("it was just set"));
        }
        self.write(address, best, kept.as_ref(), model)?;
        tracing::info!(address, step, "the model is exported");
        Ok(kept)
    }

    fn write(
        &self,
        address: &str,
        best: Option<&Best>,
        kept: Option<&Kept>,
        model: Model<'_>,
    ) -> Result<(), WeightsError> {
        let tables = (model.rows)(address)?;
        let mut notes = Vec::new();
        if let Some(best) = best {
            let best = Best { kept: kept.cloned(), ..best.clone() };
            notes.push((NOTE, serde_json::to_string(&best).expect("it has text keys")));
        }
        let Some(tables) = tables else {
            return weights::save_noted(address, &self.layout, model.parameters, notes);
        };
        let text = serde_json::to_string(&tables).expect("it has text keys");
        notes.push((exported_tables::NOTE, text));
        let replaced = weights::exported(address).ok();
        let replaced = replaced.and_then(|file| ExportedTables::read(&file).ok().flatten());
        weights::save_noted(address, &self.layout, model.parameters, notes)?;
        tables.remove_replaced(address, replaced);
        Ok(())
    }

    /// Exports the model to `address`, and repeats that with `patience`. Meanwhile, and
    /// if it fails, the model is in the file `name` of the fallback, whatever ends this process. A
    /// store may take long to answer, so the file is there before the first attempt.
    fn save_patiently(
        &self,
        (address, name): (&str, &str),
        best: Option<&Best>,
        step: u64,
        model: Model<'_>,
        patience: Patience<'_>,
    ) -> Result<Option<Kept>, String> {
        let save = || self.save(address, best, step, model);
        let is_remote = Storage::is_remote(address);
        let mut elsewhere = is_remote.then(|| self.save_elsewhere(name, best, model)).flatten();
        let saved = save().or_else(|error| {
            if !is_remote {
                elsewhere = self.save_elsewhere(name, best, model);
            }
            with_patience(address, patience.limit, error, save, patience.sleep)
        });
        match (&saved, &elsewhere) {
            (Ok(_), Some(Ok(path))) => {
                drop(fs::remove_file(path));
                drop(fs::remove_dir_all(format!("{path}.tables")));
            }
            (Err(_), Some(Err(_))) => {
                elsewhere = self.save_elsewhere(name, best, model);
            }
            _ => {}
        }
        saved.map_err(|error| error.to_string() + &where_kept(elsewhere))
    }

    /// Writes the model to the file `name` of the fallback, if there is one. Returns where it is.
    fn save_elsewhere(
        &self,
        name: &str,
        best: Option<&Best>,
        model: Model<'_>,
    ) -> Option<Result<String, WeightsError>> {
        let path = self.places.fallback.as_deref()?.join(name).to_str()?.to_owned();
        let saved = self.write(&path, best, None, model);
        Some(saved.map(|()| path))
    }
}

impl Best {
    /// What the file at `address` says of itself; `None`: nothing.
    fn read(address: &str) -> Result<Option<Self>, StorageError> {
        let note = weights::note(&weights::exported(address)?, NOTE)?;
        Ok(note.and_then(|note| serde_json::from_str(&note).ok()))
    }

    /// Keeps the file at `address` under another name, unless this job has written it, or this
    /// model is as good: it is no best model, or one that does not compare, or a better one. Of
    /// models that compare, the best is kept; no other file is replaced. Returns where it is.
    fn keep_better(&self, address: &str) -> Result<Option<Kept>, WeightsError> {
        let found = match Self::read(address) {
            Ok(found) => found,
            Err(StorageError::NotFound { .. }) => return Ok(None),
            Err(error) if error.is_outage() => return Err(error.into()),
            // A store that permits writing alone does not say what it has.
            Err(error) => {
                tracing::warn!(%error, "what the best model replaces is not known");
                return Ok(None);
            }
        };
        if let Some(found) = &found {
            if found.run == self.run && !self.run.is_empty() {
                return Ok(found.kept.clone());
            }
            if self.is_as_good_as(found) {
                return Ok(None);
            }
        }
        let value = found.as_ref().filter(|found| found.metric == self.metric);
        let value = value.map(|found| found.value);
        for number in 1..=PREVIOUS_MAX {
            let name = paths::previous_of(address, number);
            let suffix = &name[address.len()..];
            if paths::is_same_file(address, &name) {
                // A worker that did not come to the export has kept it.
                return Ok(Some(Kept { address: name, value }));
            }
            let is_free = match (Self::read(&name), &found) {
                (Err(StorageError::NotFound { .. }), _) => !paths::is_taken(&name),
                (Err(error), _) if error.is_outage() => return Err(error.into()),
                (Ok(Some(kept)), Some(found)) if kept.is_as_good_as(found) => return Ok(None),
                (Ok(Some(kept)), Some(found)) => found.is_as_good_as(&kept),
                (Ok(_) | Err(_), _) => false,
            };
            if is_free {
                Storage::open(address)?.copy_beside(suffix)?;
                return Ok(Some(Kept { address: name, value }));
            }
        }
        let reason = format!("{PREVIOUS_MAX} files with names in {PREVIOUS} stand beside it");
        Err(WeightsError::Mismatch { path: address.into(), reason })
    }

    fn is_as_good_as(&self, other: &Self) -> bool {
        let Self { value, metric, .. } = self;
        let is_better = if metric.highest { *value >= other.value } else { *value <= other.value };
        *metric == other.metric && is_better
    }
}

/// Says where a model is that its place did not take, as the end of a sentence.
fn where_kept(kept: Option<Result<String, WeightsError>>) -> String {
    match kept {
        Some(Ok(path)) => format!("; it is in {path}"),
        Some(Err(error)) => format!("; nor was it written to the job's directory: {error}"),
        None => String::new(),
    }
}

/// Name of a [`Best`] in the notes of a file.
const NOTE: &str = "elasticdl.best";
const PREVIOUS_MAX: u32 = 100;
const BEST_FILE: &str = "best.safetensors";
const LAST_FILE: &str = "model.safetensors";

#[cfg(test)]
mod tests;
