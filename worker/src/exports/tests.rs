//! Which model is where after attempts that succeed and that fail.

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

const NO_ROWS: WriteRows<'static> = &|_| Ok(None);

fn of(parameters: &Arc<Vec<f32>>) -> Model<'_> {
    Model { parameters, rows: NO_ROWS }
}

fn model(value: f32) -> Arc<Vec<f32>> {
    Arc::new(vec![value])
}

#[test]
fn a_failed_job_exports_beside_the_model_of_a_good_one() {
    let target = Target::new();
    let exports = target.exports();
    exports.save_last(9, false, of(&model(1.0)), patience(0, &|_| false)).unwrap();
    exports.save_last(4, true, of(&model(2.0)), patience(0, &|_| false)).unwrap();
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
    let error = exports.save_last(9, false, of(&model(1.0)), patience(60, &sleep)).unwrap_err();
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
    target.exports().save_last(9, false, of(&model(1.0)), patience(0, &|_| false)).unwrap();
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
    exports.save_last(9, false, of(&model(1.0)), patience(60, &stops)).unwrap_err();
    assert_eq!(pauses.get(), 1);
    let frees = |_| {
        fs::remove_file(target.path("out")).unwrap();
        true
    };
    exports.save_last(9, false, of(&model(1.0)), patience(60, &frees)).unwrap();
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
    exports.save_last(9, false, of(&model(1.0)), patience).unwrap();
    assert_eq!(target.value("out/last"), 1.0);
    fs::remove_dir_all(target.path("out")).unwrap();
    fs::write(target.path("out"), "no folder").unwrap();
    exports.take_best((3, 0.5), model(3.0));
    assert_eq!(
        exports.save_best_at_end(NO_ROWS, patience),
        Some(SavedBest { step: 3, kept: Ok(None) })
    );
    assert_eq!((target.value("out/best"), exports.save_best(NO_ROWS)), (3.0, None));
    assert_eq!(fs::read_dir(target.path("job")).unwrap().count(), 0);
}

#[test]
fn the_best_model_is_kept_until_it_is_written() {
    let target = Target::new();
    let mut exports = target.exports();
    assert_eq!(exports.save_best(NO_ROWS), None);
    fs::write(target.path("out"), "no folder").unwrap();
    exports.take_best((3, 0.5), model(3.0));
    assert!(exports.save_best(NO_ROWS).unwrap().kept.is_err());
    // A later evaluation has not found a better one.
    assert!(exports.save_best(NO_ROWS).unwrap().kept.is_err());
    let error =
        exports.save_best_at_end(NO_ROWS, patience(0, &|_| false)).unwrap().kept.unwrap_err();
    assert!(error.contains("job/best.safetensors"), "{error}");
    assert_eq!(target.value("job/best.safetensors"), 3.0);
    let kept_there = Best::read(target.path("job/best.safetensors").to_str().unwrap());
    assert_eq!(kept_there.unwrap().map(|best| best.step), Some(3), "a file says what it is");
    fs::remove_file(target.path("out")).unwrap();
    assert_eq!(exports.save_best(NO_ROWS), Some(SavedBest { step: 3, kept: Ok(None) }));
    assert_eq!((target.value("out/best"), exports.save_best(NO_ROWS)), (3.0, None));
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
            kept.push(exports.save_best(NO_ROWS).unwrap().kept.unwrap().is_some());
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
    let kept = exports.save_best(NO_ROWS).unwrap().kept.unwrap().unwrap();
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
    assert_eq!(earlier.save_best(NO_ROWS), Some(SavedBest { step: 7, kept: Ok(None) }));
    // This worker, or the master, is lost before anybody knows.
    let mut first = exporter("1");
    first.take_best((1, 0.5), model(2.0));
    first.save_best(NO_ROWS).unwrap();
    let address = target.path("out/best.previous").to_str().unwrap().to_owned();
    let told = |step| SavedBest {
        step,
        kept: Ok(Some(Kept { address: address.clone(), value: Some(0.25) })),
    };
    assert_eq!(exporter("1").saved_best((1, 0.5)), Some(told(1)));
    let mut second = exporter("1");
    second.take_best((2, 0.375), model(3.0));
    assert_eq!(second.save_best(NO_ROWS), Some(told(2)));
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
    assert!(exports.save_best(NO_ROWS).unwrap().kept.is_ok());
    assert!(exports.holds_best((3, 0.1)) && !exports.holds_best((4, 0.1)));
    exports.save_last(3, false, of(&model(3.0)), patience(0, &|_| false)).unwrap();
    fs::rename(target.path("out/last"), target.path("out/best")).unwrap();
    assert!(!exports.holds_best((3, 0.1)));
}
