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
use crate::model::NamedTensor;
use crate::paths;
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
        parameters: &Arc<Vec<f32>>,
        patience: Patience<'_>,
    ) -> Result<(), String> {
        let Some(last) = &self.places.last else { return Ok(()) };
        let address = if has_failed { failed_export(last) } else { last.clone() };
        self.save_patiently((&address, LAST_FILE), None, step, parameters, patience)
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
    pub(crate) fn save_best(&mut self) -> Option<SavedBest> {
        let (address, _) = self.places.best.as_ref()?;
        let (best, parameters) = self.unsaved_best.as_ref()?;
        let step = best.step;
        let kept = self.save(address, Some(best), step, parameters);
        if kept.is_ok() {
            self.unsaved_best = None;
        }
        Some(SavedBest { step, kept: kept.map_err(|error| error.to_string()) })
    }

    /// Like [`Exports::save_best`], at the end of the job: a failed attempt is repeated with
    /// `patience`.
    pub(crate) fn save_best_at_end(&mut self, patience: Patience<'_>) -> Option<SavedBest> {
        let (address, _) = self.places.best.as_ref()?;
        let (best, parameters) = self.unsaved_best.take()?;
        let (step, file) = (best.step, (address.as_str(), BEST_FILE));
        let kept = self.save_patiently(file, Some(&best), step, &parameters, patience);
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
        parameters: &Arc<Vec<f32>>,
    ) -> Result<Option<Kept>, WeightsError> {
        let mut kept = None;
        if let Some(best) = best {
            let known = &mut *self.kept.borrow_mut();
            if known.is_none() {
                *known = Some(best.keep_better(address)?);
            }
            kept.clone_from(known.as_ref().expect("it was just set"));
        }
        self.write(address, best, kept.as_ref(), parameters)?;
        tracing::info!(address, step, "the model is exported");
        Ok(kept)
    }

    fn write(
        &self,
        address: &str,
        best: Option<&Best>,
        kept: Option<&Kept>,
        parameters: &Arc<Vec<f32>>,
    ) -> Result<(), WeightsError> {
        let note = best.map(|best| {
            let best = Best { kept: kept.cloned(), ..best.clone() };
            (NOTE, serde_json::to_string(&best).expect("it has text keys"))
        });
        weights::save_noted(address, &self.layout, parameters, note)
    }

    /// Exports the model to `address`, and repeats that with `patience`. Meanwhile, and
    /// if it fails, the model is in the file `name` of the fallback.
    fn save_patiently(
        &self,
        (address, name): (&str, &str),
        best: Option<&Best>,
        step: u64,
        parameters: &Arc<Vec<f32>>,
        patience: Patience<'_>,
    ) -> Result<Option<Kept>, String> {
        let save = || self.save(address, best, step, parameters);
        let error = match save() {
            Ok(kept) => return Ok(kept),
            Err(error) => error,
        };
        // Whatever ends this process during the wait, the model is there.
        let mut elsewhere = self.save_elsewhere(name, best, parameters);
        let saved = with_patience(address, patience.limit, error, save, patience.sleep);
        match (&saved, &elsewhere) {
            (Ok(_), Some(Ok(path))) => drop(fs::remove_file(path)),
            (Err(_), Some(Err(_))) => {
                elsewhere = self.save_elsewhere(name, best, parameters);
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
        parameters: &Arc<Vec<f32>>,
    ) -> Option<Result<String, WeightsError>> {
        let path = self.places.fallback.as_deref()?.join(name).to_str()?.to_owned();
        let saved = self.write(&path, best, None, parameters);
        Some(saved.map(|()| path))
    }
}

impl Best {
    /// What the file at `address` says of itself; `None`: nothing.
    fn read(address: &str) -> Result<Option<Self>, StorageError> {
        let note = weights::note(address, NOTE)?;
        Ok(note.and_then(|note| serde_json::from_str(&note).ok()))
    }

    /// Keeps the file at `address` under another name, unless this job has written it, or this
    /// model is as good: it is no best model, or one that does not compare, or a better one. Of
    /// models that compare, the best is kept; no other file is replaced. Returns where it is.
    fn keep_better(&self, address: &str) -> Result<Option<Kept>, WeightsError> {
        let found = match Self::read(address) {
            Ok(found) => found,
            Err(StorageError::NotFound { .. }) => return Ok(None),
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
            let suffix = match number {
                1 => PREVIOUS.to_owned(),
                _ => format!("{PREVIOUS}.{number}"),
            };
            let name = format!("{address}{suffix}");
            if paths::is_same_file(address, &name) {
                // A worker that did not come to the export has kept it.
                return Ok(Some(Kept { address: name, value }));
            }
            let is_free = match (Self::read(&name), &found) {
                (Err(StorageError::NotFound { .. }), _) => !paths::is_taken(&name),
                (Ok(Some(kept)), Some(found)) if kept.is_as_good_as(found) => return Ok(None),
                (Ok(Some(kept)), Some(found)) => found.is_as_good_as(&kept),
                (Ok(_) | Err(_), _) => false,
            };
            if is_free {
                Storage::open(address)?.copy_beside(&suffix)?;
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
/// Suffix of the name of a file that was not replaced.
pub(crate) const PREVIOUS: &str = ".previous";
const PREVIOUS_MAX: u32 = 100;
const BEST_FILE: &str = "best.safetensors";
const LAST_FILE: &str = "model.safetensors";

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::os::unix::fs as unix_fs;

    use super::*;

    /// A folder `out` for exports, with a file in its place while it `is_away`.
    struct Target {
        folder: tempfile::TempDir,
    }

    impl Target {
        fn new() -> Self {
            let target = Self { folder: tempfile::tempdir().unwrap() };
            fs::create_dir(target.folder.path().join("job")).unwrap();
            target
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn exports(&self) -> Exports {
            let address = |name: &str| self.path(name).to_str().map(str::to_owned);
            let places = ExportPlaces {
                last: address("out/last"),
                best: address("out/best").map(|best| (best, metric("loss"))),
                run: "0000000a".into(),
                fallback: Some(self.path("job")),
            };
            Exports::new(places, vec![NamedTensor { name: "w".into(), shape: vec![1] }])
        }

        fn value(&self, name: &str) -> f32 {
            let mut value = [f32::NAN];
            let layout = [NamedTensor { name: "w".into(), shape: vec![1] }];
            weights::load(self.path(name).to_str().unwrap(), &layout, &mut value).unwrap();
            value[0]
        }
    }

    fn patience(seconds: u64, sleep: &dyn Fn(Duration) -> bool) -> Patience<'_> {
        Patience { limit: Duration::from_secs(seconds), sleep }
    }

    fn metric(name: &str) -> BestMetric {
        BestMetric { name: name.into(), highest: false, records: 10 }
    }

    fn model(value: f32) -> Arc<Vec<f32>> {
        Arc::new(vec![value])
    }

    #[test]
    fn a_failed_job_exports_beside_the_model_of_a_good_one() {
        let target = Target::new();
        let exports = target.exports();
        exports.save_last(9, false, &model(1.0), patience(0, &|_| false)).unwrap();
        exports.save_last(4, true, &model(2.0), patience(0, &|_| false)).unwrap();
        assert_eq!((target.value("out/last"), target.value("out/last.failed")), (1.0, 2.0));
    }

    #[test]
    fn a_model_that_its_place_does_not_take_is_in_the_jobs_directory() {
        let target = Target::new();
        fs::write(target.path("out"), "no folder").unwrap();
        let exports = target.exports();
        let pauses = Cell::new(0);
        let sleep = |_| {
            pauses.set(pauses.get() + 1);
            false
        };
        let error = exports.save_last(9, false, &model(1.0), patience(60, &sleep)).unwrap_err();
        assert!(pauses.get() > 5, "{pauses:?}");
        let path = target.path("job/model.safetensors");
        assert!(error.ends_with(&format!("; it is in {}", path.display())), "{error}");
        assert!(error.contains("out/last"), "{error}");
        assert_eq!(target.value("job/model.safetensors"), 1.0);
    }

    #[test]
    fn a_link_at_the_place_of_an_export_stays() {
        let target = Target::new();
        fs::create_dir(target.path("out")).unwrap();
        fs::write(target.path("real"), "old").unwrap();
        unix_fs::symlink(target.path("real"), target.path("out/last")).unwrap();
        target.exports().save_last(9, false, &model(1.0), patience(0, &|_| false)).unwrap();
        assert!(target.path("out/last").is_symlink());
        assert_eq!(target.value("real"), 1.0);
    }

    #[test]
    fn a_stop_leaves_an_export_at_the_end_one_attempt() {
        let target = Target::new();
        fs::write(target.path("out"), "no folder").unwrap();
        let exports = target.exports();
        let pauses = Cell::new(0);
        let stops = |_| {
            pauses.set(pauses.get() + 1);
            true
        };
        exports.save_last(9, false, &model(1.0), patience(60, &stops)).unwrap_err();
        assert_eq!(pauses.get(), 1);
        let frees = |_| {
            fs::remove_file(target.path("out")).unwrap();
            true
        };
        exports.save_last(9, false, &model(1.0), patience(60, &frees)).unwrap();
        assert_eq!(target.value("out/last"), 1.0);
    }

    #[test]
    fn an_export_at_the_end_is_repeated_until_its_place_takes_it() {
        let target = Target::new();
        fs::write(target.path("out"), "no folder").unwrap();
        // Frees the place during the first pause, in which the model is in the job's directory.
        let sleep = |_| {
            assert_eq!(fs::read_dir(target.path("job")).unwrap().count(), 1);
            fs::remove_file(target.path("out")).unwrap();
            false
        };
        let mut exports = target.exports();
        let patience = patience(1, &sleep);
        exports.save_last(9, false, &model(1.0), patience).unwrap();
        assert_eq!(target.value("out/last"), 1.0);
        fs::remove_dir_all(target.path("out")).unwrap();
        fs::write(target.path("out"), "no folder").unwrap();
        exports.take_best((3, 0.5), model(3.0));
        assert_eq!(exports.save_best_at_end(patience), Some(SavedBest { step: 3, kept: Ok(None) }));
        assert_eq!((target.value("out/best"), exports.save_best()), (3.0, None));
        assert_eq!(fs::read_dir(target.path("job")).unwrap().count(), 0);
    }

    #[test]
    fn the_best_model_is_kept_until_it_is_written() {
        let target = Target::new();
        let mut exports = target.exports();
        assert_eq!(exports.save_best(), None);
        fs::write(target.path("out"), "no folder").unwrap();
        exports.take_best((3, 0.5), model(3.0));
        assert!(exports.save_best().unwrap().kept.is_err());
        // A later evaluation has not found a better one.
        assert!(exports.save_best().unwrap().kept.is_err());
        let error = exports.save_best_at_end(patience(0, &|_| false)).unwrap().kept.unwrap_err();
        assert!(error.contains("job/best.safetensors"), "{error}");
        assert_eq!(target.value("job/best.safetensors"), 3.0);
        let kept_there = Best::read(target.path("job/best.safetensors").to_str().unwrap());
        assert_eq!(kept_there.unwrap().map(|best| best.step), Some(3), "a file says what it is");
        fs::remove_file(target.path("out")).unwrap();
        assert_eq!(exports.save_best(), Some(SavedBest { step: 3, kept: Ok(None) }));
        assert_eq!((target.value("out/best"), exports.save_best()), (3.0, None));
    }

    #[test]
    fn a_better_model_than_the_jobs_own_is_kept_beside_it() {
        let target = Target::new();
        let places = |name: &str| ExportPlaces {
            best: target.path("best").to_str().map(|best| (best.to_owned(), metric(name))),
            ..ExportPlaces::default()
        };
        let jobs = Cell::new(0);
        let job = |name: &str| {
            let run = jobs.replace(jobs.get() + 1).to_string();
            Exports { places: ExportPlaces { run, ..places(name) }, ..target.exports() }
        };
        // Saves models with these losses; their values are the losses.
        let save = |exports: &mut Exports, losses: &[f32]| {
            let mut kept = Vec::new();
            for (step, &loss) in (1..).zip(losses) {
                exports.take_best((step, loss.into()), model(loss));
                kept.push(exports.save_best().unwrap().kept.unwrap().is_some());
            }
            let previous = target.path("best.previous");
            (kept, target.value("best"), previous.exists().then(|| target.value("best.previous")))
        };
        assert_eq!(save(&mut job("loss"), &[3.0, 0.5, 0.2]), (vec![false; 3], 0.2, None));
        // The first model of the next job is worse, and the file is the job's own from then on.
        let second = save(&mut job("loss"), &[4.0, 1.0]);
        assert_eq!(second, (vec![true, true], 1.0, Some(0.2)));
        // The best of all stays.
        assert_eq!(save(&mut job("loss"), &[2.0]), (vec![false], 2.0, Some(0.2)));
        assert_eq!(save(&mut job("loss"), &[0.1]), (vec![false], 0.1, Some(0.2)));
        // The best of those that compare is kept, and nothing else gives way.
        assert_eq!(save(&mut job("mae"), &[0.3]), (vec![true], 0.3, Some(0.1)));
        fs::write(target.path("best"), "no model").unwrap();
        fs::create_dir(target.path("best.previous.2")).unwrap();
        assert_eq!(save(&mut job("mae"), &[0.25]), (vec![true], 0.25, Some(0.1)));
        assert_eq!(fs::read(target.path("best.previous.3")).unwrap(), b"no model");
        assert_eq!(save(&mut job("loss"), &[9.0]), (vec![true], 9.0, Some(0.1)));
        assert_eq!(target.value("best.previous.4"), 0.25);
    }

    #[test]
    fn a_file_is_kept_once_however_often_its_replacement_is_tried() {
        let target = Target::new();
        fs::create_dir(target.path("out")).unwrap();
        fs::write(target.path("out/best"), "another model").unwrap();
        // As a worker that was killed before its export has left it.
        fs::hard_link(target.path("out/best"), target.path("out/best.previous")).unwrap();
        let mut exports = target.exports();
        exports.take_best((1, 0.5), model(1.0));
        let kept = exports.save_best().unwrap().kept.unwrap().unwrap();
        assert!(kept.address.ends_with("out/best.previous") && kept.value.is_none(), "{kept:?}");
        assert_eq!(fs::read(target.path("out/best.previous")).unwrap(), b"another model");
        assert_eq!(fs::read_dir(target.path("out")).unwrap().count(), 2);
    }

    #[test]
    fn a_kept_file_is_told_by_a_later_exporter_and_at_the_end_with_its_value() {
        let target = Target::new();
        let exporter = |run: &str| {
            let exports = target.exports();
            Exports { places: ExportPlaces { run: run.into(), ..exports.places }, ..exports }
        };
        let mut earlier = exporter("0");
        earlier.take_best((7, 0.25), model(1.0));
        assert_eq!(earlier.save_best(), Some(SavedBest { step: 7, kept: Ok(None) }));
        // This worker, or the master, is lost before anybody knows.
        let mut first = exporter("1");
        first.take_best((1, 0.5), model(2.0));
        first.save_best().unwrap();
        let address = target.path("out/best.previous").to_str().unwrap().to_owned();
        let told = |step| SavedBest {
            step,
            kept: Ok(Some(Kept { address: address.clone(), value: Some(0.25) })),
        };
        assert_eq!(exporter("1").saved_best((1, 0.5)), Some(told(1)));
        let mut second = exporter("1");
        second.take_best((2, 0.375), model(3.0));
        assert_eq!(second.save_best(), Some(told(2)));
        assert_eq!(second.saved_best((2, 0.375)), Some(told(2)));
        for (run, best) in [("1", (1, 0.5)), ("0", (2, 0.375))] {
            assert_eq!(exporter(run).saved_best(best), None, "it is not this job's best model");
        }
        assert_eq!(fs::read_dir(target.path("out")).unwrap().count(), 2);
    }

    #[test]
    fn a_place_holds_the_best_model_of_an_earlier_job_or_does_not() {
        let target = Target::new();
        let mut exports = target.exports();
        assert!(!exports.holds_best((3, 0.1)));
        exports.take_best((3, 0.1), model(3.0));
        assert!(exports.save_best().unwrap().kept.is_ok());
        assert!(exports.holds_best((3, 0.1)) && !exports.holds_best((4, 0.1)));
        exports.save_last(3, false, &model(3.0), patience(0, &|_| false)).unwrap();
        fs::rename(target.path("out/last"), target.path("out/best")).unwrap();
        assert!(!exports.holds_best((3, 0.1)));
    }
}
