//! Checkpoints that have what has changed in the rows since others.

use elasticdl_tables::Ids;

use super::rows::{members, ranks, read, rows, saved, step_with, with_tables};
use super::*;

/// Ranks that train, and write checkpoints together.
struct Job {
    ranks: Vec<elasticdl_tables::Owned>,
    writers: Ranks,
    storage: Storage,
}

impl Job {
    /// Ranks at step 30, whose rows are those of the first step: so many of each rank.
    fn new(storage: &Storage, world_size: usize, keep: usize, rows: u64) -> Self {
        let mut ranks = ranks(world_size);
        for rank in &mut ranks {
            let empty = rank.empty(&rank.shards_at_start(&members(world_size)));
            rank.restore(30, (1, members(world_size)), empty);
        }
        let writers = Ranks::new(storage, with_tables(), world_size, keep);
        let mut job = Self { ranks, writers, storage: storage.clone() };
        job.step(0, rows);
        job
    }

    /// Each rank touches so many rows of its own, from `first` on.
    fn step(&mut self, first: u64, count: u64) {
        step_with(&mut self.ranks, |rank| {
            let mut ids = Ids::new(2);
            ids.begin_record();
            (first..first + count).for_each(|id| _ = ids.push(0, rank << 32 | id));
            ids
        });
    }

    fn write(&mut self) -> Result<String, String> {
        let step = self.ranks[0].step().unwrap();
        self.writers.write_with_rows(step, saved(&self.ranks))
    }

    /// Trains for a step, writes a checkpoint, and returns its name.
    fn go_on(&mut self, first: u64, count: u64) -> String {
        self.step(first, count);
        self.write().unwrap()
    }

    /// The next checkpoint has all rows.
    fn forget(&mut self) {
        self.writers.writers.iter_mut().for_each(CheckpointWriter::forget_rows);
    }

    fn rows_of(&self, name: &str) -> serde_json::Value {
        let manifest = self.storage.join(name).read("manifest.json").unwrap();
        serde_json::from_slice::<serde_json::Value>(&manifest).unwrap()["rows"].clone()
    }

    fn path(&self, name: &str, file: &str) -> PathBuf {
        PathBuf::from(self.storage.address()).join(name).join(file)
    }

    fn names(&self) -> Vec<String> {
        let names = Name::all(&self.storage.list_folders(name::PREFIX).unwrap());
        names.into_keys().map(|name| name.to_string()).collect()
    }
}

#[test]
fn a_checkpoint_has_what_has_changed_since_the_one_before() {
    let (_folder, storage) = folder();
    let mut job = Job::new(&storage, 2, 99, 5000);
    let mut written = Vec::new();
    for first in [0, 3, 4998] {
        let name = job.go_on(first, 4);
        let bytes = storage.list(&name).unwrap().iter().map(|file| file.bytes).sum::<u64>();
        written.push((name, bytes, rows(&job.ranks)));
    }
    let [(whole, bytes, _), (next, of_next, _), (last, of_last, _)] = &written[..] else {
        panic!()
    };
    for (name, base) in [(whole, None), (next, Some(&**whole)), (last, Some(&**next))] {
        let files = job.rows_of(name)["files"].as_array().unwrap().clone();
        assert!(files.iter().all(|file| file["base"].as_str() == base), "{files:?}");
    }
    assert!(4 * of_next < *bytes && 4 * of_last < *bytes, "{of_next} of {bytes} bytes");
    // They are read by any number of ranks, with the touches of all steps.
    for (name, _, expected) in &written {
        for reads in [1, 3] {
            assert!(rows(&read(&storage, name, reads).unwrap()) == *expected, "{name}, {reads}");
        }
    }
    assert_eq!(job.rows_of(last)["touches"], 2 * (5000 + 3 * 4));
    assert_eq!(step_of(&begin(&with_tables(), Some(&storage), None)), Some(34));
    // A rank that has written no part of it, as it has just joined, writes all of its rows.
    job.writers.writers[1] = Ranks::new(&storage, with_tables(), 1, 99).writers.pop().unwrap();
    let joined = job.go_on(10, 4);
    let files = job.rows_of(&joined)["files"].clone();
    assert_eq!((files[0]["base"].as_str(), &files[1]["base"]), (Some(&**last), &().into()));
    assert!(rows(&read(&storage, &joined, 2).unwrap()) == rows(&job.ranks));
}

#[test]
fn a_chain_ends_with_its_length_and_with_half_of_the_size() {
    let (_folder, storage) = folder();
    let mut job = Job::new(&storage, 1, 1, 40_000);
    let mut go_on = |first, count| {
        let name = job.go_on(first, count);
        job.rows_of(&name)["chain"]["changes"].as_u64().unwrap()
    };
    let few: Vec<u64> = (0..11).map(|first| go_on(first, 4)).collect();
    assert_eq!(few, [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]);
    assert_eq!([27_000, 27_000, 4].map(|count| go_on(0, count)), [2, 0, 1]);
}

#[test]
fn a_checkpoint_stays_as_long_as_one_that_is_kept_is_based_on_it() {
    let (_folder, storage) = folder();
    let mut job = Job::new(&storage, 2, 1, 5000);
    let chain: Vec<String> = (0..3).map(|first| job.go_on(first, 4)).collect();
    assert_eq!(job.names(), chain);
    assert!(rows(&read(&storage, &chain[2], 3).unwrap()) == rows(&job.ranks));
    job.forget();
    let whole = job.go_on(0, 4);
    assert_eq!(job.names(), std::slice::from_ref(&whole));
    assert!(rows(&read(&storage, &whole, 3).unwrap()) == rows(&job.ranks));
}

#[test]
fn a_damaged_checkpoint_takes_those_along_that_are_based_on_it_and_no_others() {
    let (_folder, storage) = folder();
    let mut job = Job::new(&storage, 2, 9, 5000);
    job.go_on(0, 4);
    job.forget();
    let [whole, changed, newest] = [1, 2, 3].map(|first| job.go_on(first, 4));
    let file = job.path(&changed, "rows-00000-of-00002");
    let bytes = std::fs::read(&file).unwrap();
    let mut flipped = bytes.clone();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&file, flipped).unwrap();
    let RestoreError::Refused(error) = read(&storage, &newest, 1).unwrap_err() else { panic!() };
    let expected = format!("its rows are changes since {changed}: rows-00000-of-00002: shard");
    assert!(error.contains(&expected), "{error}");
    assert!(read(&storage, &whole, 1).is_ok());
    std::fs::write(&file, &bytes).unwrap();
    assert!(read(&storage, &newest, 1).is_ok());
    // What is missing is found before any state is taken.
    std::fs::remove_file(job.path(&whole, name::MANIFEST)).unwrap();
    let outcome = begin(&with_tables(), Some(&storage), None);
    assert_eq!((step_of(&outcome), outcome.1.len()), (Some(32), 2), "{:?}", outcome.1);
    let expected = format!("its rows are changes since {whole}: it is missing");
    assert!(outcome.1.iter().all(|(_, reason)| reason.contains(&expected)), "{:?}", outcome.1);
    // The next one has all rows, as nothing is complete that it could be based on.
    std::fs::remove_dir_all(job.path(&newest, "")).unwrap();
    std::fs::remove_dir_all(job.path(&changed, "")).unwrap();
    let name = job.go_on(4, 4);
    assert!(job.rows_of(&name)["files"][0]["base"].is_null());
    assert!(rows(&read(&storage, &name, 2).unwrap()) == rows(&job.ranks));
}

#[test]
fn a_writer_that_dies_at_any_byte_of_the_changes_leaves_what_they_are_based_on() {
    let total = std::cell::Cell::new(0);
    let mut survived = 0;
    let mut die_at = |at: i64| {
        let store = Arc::new(InMemory::new());
        let open = |store: Arc<dyn ObjectStore>| Storage::within(store, Path::default(), "memory");
        let storage = open(Arc::clone(&store) as Arc<dyn ObjectStore>);
        let dying = Dying { store, bytes_left: AtomicI64::new(i64::MAX) };
        let dying = Arc::new(dying);
        let mut job = Job::new(&open(Arc::clone(&dying) as Arc<dyn ObjectStore>), 2, 1, 4000);
        let whole = job.go_on(0, 4);
        let before = rows(&job.ranks);
        job.step(2, 4);
        dying.bytes_left.store(at, Ordering::Relaxed);
        let written = job.write();
        total.set(at - dying.bytes_left.load(Ordering::Relaxed));
        let expected = if written.is_ok() { rows(&job.ranks) } else { before };
        survived += usize::from(written.is_err());
        let outcome = begin(&with_tables(), Some(&storage), None);
        let name = written.unwrap_or(whole);
        assert_eq!(outcome.0.as_ref().unwrap().as_ref().unwrap().name, name, "killed at {at}");
        assert!(rows(&read(&storage, &name, 3).unwrap()) == expected, "killed at {at}");
        // The next one is based on what is complete.
        dying.bytes_left.store(i64::MAX, Ordering::Relaxed);
        let next = job.go_on(4, 4);
        assert_eq!(job.rows_of(&next)["files"][1]["base"].as_str(), Some(&*name), "killed at {at}");
        assert!(rows(&read(&storage, &next, 1).unwrap()) == rows(&job.ranks), "killed at {at}");
    };
    die_at(i64::MAX / 2);
    let whole = total.get();
    for at in (0..whole).step_by((whole / 12) as usize).chain(whole - 4..=whole) {
        die_at(at);
    }
    assert!(survived >= 14, "{survived}");
}
