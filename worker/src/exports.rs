//! Exports of a training job: the model at its end, and the best one of its evaluations.
//!
//! **Invariants:** an export that fails does not end training. At the end of a job it is repeated
//! for some time, with the model in the job's directory meanwhile. A job that fails does not
//! replace a file that a good job has written: its model lies beside it, under another name.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use elasticdl_proto::failed_export;

use crate::model::NamedTensor;
use crate::storage::with_patience;
use crate::weights::{self, WeightsError};

/// Where a job exports models, and the best one as long as it is not written.
#[derive(Debug)]
pub(crate) struct Exports {
    places: ExportPlaces,
    layout: Vec<NamedTensor>,
    unsaved_best: Option<(u64, Arc<Vec<f32>>)>,
    sleep: Sleep,
}

/// Sleeps for the given time.
type Sleep = fn(&ExportPlaces, Duration);

/// Addresses of exported models.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExportPlaces {
    /// The model at the end of the job.
    pub(crate) last: Option<String>,
    /// The best model so far.
    pub(crate) best: Option<String>,
    /// A folder of this machine that takes a model which its own place does not take.
    pub(crate) fallback: Option<PathBuf>,
}

impl Exports {
    pub(crate) fn new(places: ExportPlaces, layout: Vec<NamedTensor>) -> Self {
        Self { places, layout, unsaved_best: None, sleep: |_, pause| std::thread::sleep(pause) }
    }

    /// Whether the model at the end of the job is exported.
    pub(crate) fn has_last(&self) -> bool {
        self.places.last.is_some()
    }

    /// Whether the best model is exported.
    pub(crate) fn has_best(&self) -> bool {
        self.places.best.is_some()
    }

    /// Exports the model of `step` at the end of the job, which `has_failed` or not. Repeats a
    /// failed attempt for the time of `patience`.
    ///
    /// # Errors
    /// Why it is not at its place, and where it is.
    pub(crate) fn save_last(
        &self,
        step: u64,
        has_failed: bool,
        parameters: &Arc<Vec<f32>>,
        patience: Duration,
    ) -> Result<(), String> {
        let Some(last) = &self.places.last else { return Ok(()) };
        let address = if has_failed { failed_export(last) } else { last.clone() };
        self.save_patiently((&address, LAST), step, parameters, patience)
            .map_err(|error| format!("the model of step {step} was not exported: {error}"))
    }

    /// Takes the model of `step`, which is the best so far. [`Exports::save_best`] writes it.
    pub(crate) fn take_best(&mut self, step: u64, parameters: Arc<Vec<f32>>) {
        self.unsaved_best = Some((step, parameters));
    }

    /// Exports the best model, if it is not written yet. A failure keeps it for the next call.
    /// `None`: nothing was to be written.
    pub(crate) fn save_best(&mut self) -> Option<(u64, Result<(), String>)> {
        let best = self.places.best.as_ref()?;
        let (step, parameters) = self.unsaved_best.as_ref()?;
        let (step, saved) = (*step, self.save(best, *step, parameters));
        if saved.is_ok() {
            self.unsaved_best = None;
        }
        Some((step, saved.map_err(|error| error.to_string())))
    }

    /// Like [`Exports::save_best`], at the end of the job: a failed attempt is repeated for the
    /// time of `patience`.
    pub(crate) fn save_best_at_end(
        &mut self,
        patience: Duration,
    ) -> Option<(u64, Result<(), String>)> {
        let best = self.places.best.as_ref()?;
        let (step, parameters) = self.unsaved_best.take()?;
        let saved = self.save_patiently((best, BEST), step, &parameters, patience);
        if saved.is_err() {
            self.unsaved_best = Some((step, parameters));
        }
        Some((step, saved))
    }

    fn save(
        &self,
        address: &str,
        step: u64,
        parameters: &Arc<Vec<f32>>,
    ) -> Result<(), WeightsError> {
        weights::save(address, &self.layout, parameters)?;
        tracing::info!(address, step, "the model is exported");
        Ok(())
    }

    /// Exports the model to `address`, and repeats that for the time of `patience`. Meanwhile, and
    /// if it fails, the model is in the file `name` of the fallback.
    fn save_patiently(
        &self,
        (address, name): (&str, &str),
        step: u64,
        parameters: &Arc<Vec<f32>>,
        patience: Duration,
    ) -> Result<(), String> {
        let save = || self.save(address, step, parameters);
        let Err(error) = save() else { return Ok(()) };
        // Whatever ends this process during the wait, the model is there.
        let mut kept = self.save_elsewhere(name, parameters);
        let sleep = |pause| (self.sleep)(&self.places, pause);
        let saved = with_patience(address, patience, error, save, sleep);
        match (saved, &kept) {
            (Ok(()), Some(Ok(path))) => drop(fs::remove_file(path)),
            (Ok(()), _) => {}
            (Err(error), _) => {
                if matches!(kept, Some(Err(_))) {
                    kept = self.save_elsewhere(name, parameters);
                }
                return Err(error.to_string() + &where_kept(kept));
            }
        }
        Ok(())
    }

    /// Writes the model to the file `name` of the fallback, if there is one. Returns where it is.
    fn save_elsewhere(
        &self,
        name: &str,
        parameters: &Arc<Vec<f32>>,
    ) -> Option<Result<String, WeightsError>> {
        let path = self.places.fallback.as_deref()?.join(name).to_str()?.to_owned();
        let saved = weights::save(&path, &self.layout, parameters);
        Some(saved.map(|()| path))
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

const BEST: &str = "best.safetensors";
const LAST: &str = "model.safetensors";

#[cfg(test)]
mod tests {
    use std::fs;

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
                best: address("out/best"),
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

    fn model(value: f32) -> Arc<Vec<f32>> {
        Arc::new(vec![value])
    }

    #[test]
    fn a_failed_job_exports_beside_the_model_of_a_good_one() {
        let target = Target::new();
        let exports = target.exports();
        exports.save_last(9, false, &model(1.0), Duration::ZERO).unwrap();
        exports.save_last(4, true, &model(2.0), Duration::ZERO).unwrap();
        assert_eq!((target.value("out/last"), target.value("out/last.failed")), (1.0, 2.0));
    }

    #[test]
    fn a_model_that_its_place_does_not_take_is_in_the_jobs_directory() {
        let target = Target::new();
        fs::write(target.path("out"), "no folder").unwrap();
        let exports = Exports { sleep: |_, _| (), ..target.exports() };
        let patience = Duration::from_secs(60);
        let error = exports.save_last(9, false, &model(1.0), patience).unwrap_err();
        let path = target.path("job/model.safetensors");
        assert!(error.ends_with(&format!("; it is in {}", path.display())), "{error}");
        assert!(error.contains("out/last"), "{error}");
        assert_eq!(target.value("job/model.safetensors"), 1.0);
    }

    #[test]
    fn an_export_at_the_end_is_repeated_until_its_place_takes_it() {
        let target = Target::new();
        fs::write(target.path("out"), "no folder").unwrap();
        // Frees the place during the first pause, in which the model is in the job's directory.
        let sleep: Sleep = |places, _| {
            let fallback = places.fallback.as_ref().unwrap();
            assert_eq!(fs::read_dir(fallback).unwrap().count(), 1);
            fs::remove_file(fallback.with_file_name("out")).unwrap();
        };
        let mut exports = Exports { sleep, ..target.exports() };
        let patience = Duration::from_secs(1);
        exports.save_last(9, false, &model(1.0), patience).unwrap();
        assert_eq!(target.value("out/last"), 1.0);
        fs::remove_dir_all(target.path("out")).unwrap();
        fs::write(target.path("out"), "no folder").unwrap();
        exports.take_best(3, model(3.0));
        assert_eq!(exports.save_best_at_end(patience), Some((3, Ok(()))));
        assert_eq!((target.value("out/best"), exports.save_best()), (3.0, None));
        assert_eq!(fs::read_dir(target.path("job")).unwrap().count(), 0);
    }

    #[test]
    fn the_best_model_is_kept_until_it_is_written() {
        let target = Target::new();
        let mut exports = target.exports();
        assert_eq!(exports.save_best(), None);
        fs::write(target.path("out"), "no folder").unwrap();
        exports.take_best(3, model(3.0));
        assert!(matches!(exports.save_best(), Some((3, Err(_)))));
        // A later evaluation has not found a better one.
        assert!(matches!(exports.save_best(), Some((3, Err(_)))));
        let Some((3, Err(error))) = exports.save_best_at_end(Duration::ZERO) else { panic!() };
        assert!(error.contains("job/best.safetensors"), "{error}");
        assert_eq!(target.value("job/best.safetensors"), 3.0);
        fs::remove_file(target.path("out")).unwrap();
        assert_eq!(exports.save_best(), Some((3, Ok(()))));
        assert_eq!((target.value("out/best"), exports.save_best()), (3.0, None));
    }
}
