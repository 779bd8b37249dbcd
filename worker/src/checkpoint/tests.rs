//! Checkpoints in a folder, and in a store whose writer dies at any byte.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use elasticdl_data::storage::Storage;
use elasticdl_data::worker::{set_stop_flag, wait_status};
use elasticdl_proto::Generation;
use elasticdl_tables::{ComparedShards, SavedShards};
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult,
};

use super::load::Restored;
use super::manifest::tests::{fingerprint, state_at};
use super::name::Name;
use super::*;
use crate::session::checkpoint::Written;

mod changes;
mod chunks;
mod probe;
mod rows;

/// Parameters and slots of step `step`.
fn state(fingerprint: &JobFingerprint, step: u64) -> (Vec<f32>, Vec<f32>) {
    let floats =
        |len: usize, of: u64| (0..len).map(|i| (i as u64 * 31 + step * 7 + of) as f32).collect();
    (floats(fingerprint.parameters, 1), floats(fingerprint.slots, 2))
}

/// The ranks of a job, which write checkpoints together.
struct Ranks {
    fingerprint: Arc<JobFingerprint>,
    writers: Vec<CheckpointWriter>,
    generation: u64,
    patience: Duration,
}

impl Ranks {
    fn new(storage: &Storage, fingerprint: JobFingerprint, world_size: usize, keep: usize) -> Self {
        let fingerprint = Arc::new(fingerprint);
        let retention = Retention { keep, exclusive: false };
        let writer = |_| {
            CheckpointWriter::new(storage.clone(), Arc::clone(&fingerprint), retention).unwrap()
        };
        let patience = Duration::ZERO;
        Self {
            writers: (0..world_size).map(writer).collect(),
            fingerprint,
            generation: 1,
            patience,
        }
    }

    /// Writes the checkpoint of `step` and returns its name.
    fn write(&mut self, step: u64) -> Result<String, String> {
        self.write_with(step, vec![None; self.writers.len()])
    }

    /// As [`write`](Self::write), with the rows of each rank.
    fn write_with_rows(
        &mut self,
        step: u64,
        rows: Vec<Option<SavedShards>>,
    ) -> Result<String, String> {
        let part = |owned| SavedPart::Rows(owned, ComparedShards::default());
        let owned = |SavedShards { of_ranks, owned }| (of_ranks, part(owned));
        self.write_with(step, rows.into_iter().map(|rows| rows.map(owned)).collect())
    }

    /// As [`write`](Self::write), with what each rank owns.
    fn write_with(
        &mut self,
        step: u64,
        owned: Vec<Option<(Vec<Vec<u32>>, SavedPart)>>,
    ) -> Result<String, String> {
        let (mut parameters, mut slots) = state(&self.fingerprint, step);
        if self.fingerprint.chunks_have_parameters {
            parameters.clear();
        }
        if self.fingerprint.shards_optimizer {
            // Of a program, what is not divided comes last.
            slots.drain(..slots.len() - self.fingerprint.whole);
        }
        let world_size = self.writers.len();
        for (rank, (writer, owned)) in self.writers.iter_mut().zip(owned).enumerate() {
            writer.prepare(world_size);
            let (generation, patience) = (Generation(self.generation), self.patience);
            let shard = OwnShard { step, generation, rank, world_size, patience };
            writer.write(shard, state_at(step), (&parameters, &slots), owned);
        }
        let written = |writer: &mut CheckpointWriter| match next(writer) {
            Completion::Written { result, .. } => result,
            other => panic!("{other:?}"),
        };
        let parts: Vec<Result<Written, String>> = self.writers.iter_mut().map(written).collect();
        let parts = parts.into_iter().collect::<Result<Vec<Written>, String>>()?;
        self.writers[0].commit(step, &parts);
        match next(&mut self.writers[0]) {
            Completion::Committed { result, name, .. } => result.map(|_| name),
            other => panic!("{other:?}"),
        }
    }
}

fn next(writer: &mut CheckpointWriter) -> Completion {
    loop {
        match writer.poll() {
            Some(done) => return done,
            None => std::thread::yield_now(),
        }
    }
}

type Outcome = (Result<Option<Restored>, RestoreError>, Vec<(String, String)>);

/// State that a job with `fingerprint` starts from, verified float by float, and the damaged
/// checkpoints.
fn begin(fingerprint: &JobFingerprint, own: Option<&Storage>, from: Option<&Storage>) -> Outcome {
    let locations = Locations {
        own: own.cloned(),
        from: from.cloned(),
        exclusive: false,
        passed_over: Vec::new(),
    };
    let (mut parameters, mut slots) =
        (vec![f32::NAN; fingerprint.parameters], vec![f32::NAN; fingerprint.slots]);
    let mut damaged = Vec::new();
    let mut note = |name: &str, reason: &str| damaged.push((name.to_owned(), reason.to_owned()));
    let restored = restore(&locations, fingerprint, &mut parameters, &mut slots, &mut note);
    if let Ok(Some(restored)) = &restored {
        assert_eq!(restored.state, state_at(restored.state.step));
        assert!((parameters, slots) == state(fingerprint, restored.state.step));
    }
    (restored, damaged)
}

fn step_of((outcome, _): &Outcome) -> Option<u64> {
    outcome.as_ref().unwrap().as_ref().map(|restored| restored.state.step)
}

fn folder() -> (tempfile::TempDir, Storage) {
    let folder = tempfile::tempdir().unwrap();
    let storage = Storage::open(folder.path().join("checkpoints here").to_str().unwrap()).unwrap();
    (folder, storage)
}

#[test]
fn a_state_is_restored_whatever_the_number_of_ranks_that_wrote_it() {
    for world_size in [1, 2, 3, 7, 40] {
        let (_folder, storage) = folder();
        let mut ranks = Ranks::new(&storage, fingerprint(), world_size, 3);
        let name = ranks.write(30).unwrap();
        assert_eq!(name, "step-000000000030-7f3a9c21-g1");
        let expected = Restored { state: state_at(30), name, same_run: true, differences: vec![] };
        assert_eq!(begin(&fingerprint(), Some(&storage), None), (Ok(Some(expected)), Vec::new()));
        assert_eq!(storage.list("").unwrap().len(), world_size + 1);
        // The parameters alone, for a model with any optimizer.
        let CheckpointLookup::Several(name) = inspect(&storage).unwrap() else {
            panic!("no checkpoint")
        };
        let one = storage.join(&name);
        assert_eq!(inspect(&one).unwrap(), CheckpointLookup::Single);
        let mut parameters = vec![f32::NAN; fingerprint().parameters];
        assert_eq!(load_parameters(&one, &mut parameters), Ok(()));
        assert!(parameters == state(&fingerprint(), 30).0);
        let error = load_parameters(&one, &mut parameters[1..]).unwrap_err();
        assert!(error.contains("parameters, and this one has"), "{error}");
    }
}

#[test]
fn a_changed_checkpoint_is_refused_as_a_model() {
    let (folder, storage) = folder();
    let name = Ranks::new(&storage, fingerprint(), 1, 3).write(30).unwrap();
    let path = folder.path().join("checkpoints here").join(&name).join(name::shard(0, 1));
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let mut parameters = vec![0.0; fingerprint().parameters];
    let error = load_parameters(&storage.join(&name), &mut parameters).unwrap_err();
    assert!(error.contains("its digest does not match"), "{error}");
}

#[test]
fn shards_are_safetensors_files() {
    let (_folder, storage) = folder();
    Ranks::new(&storage, fingerprint(), 2, 3).write(30).unwrap();
    let (parameters, slots) = state(&fingerprint(), 30);
    let shard = |rank: usize| {
        let bytes = storage
            .read(&format!("step-000000000030-7f3a9c21-g1/{}", name::shard(rank, 2)))
            .unwrap()
            .to_vec();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        assert_eq!((8 + length) % 8, 0);
        let floats = |name: &str| -> Vec<f32> {
            let tensor = &header[name];
            assert_eq!(tensor["dtype"], "F32");
            let at = |i: usize| 8 + length + tensor["data_offsets"][i].as_u64().unwrap() as usize;
            let (floats, _) = bytes[at(0)..at(1)].as_chunks::<4>();
            let floats: Vec<f32> = floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            assert_eq!(tensor["shape"][0], floats.len());
            floats
        };
        let has = |name: &str| header.get(name).is_some();
        (has("parameters").then(|| floats("parameters")), has("slots").then(|| floats("slots")))
    };
    assert_eq!(shard(0), (Some(parameters), Some(slots[..5].to_vec())));
    assert_eq!(shard(1), (None, Some(slots[5..].to_vec())));
}

#[test]
fn the_newest_checkpoints_are_retained_and_incomplete_attempts_deleted() {
    let (folder, storage) = folder();
    let mut ranks = Ranks::new(&storage, fingerprint(), 2, 2);
    storage.write("step-000000000027-7f3a9c21-g1/shard", vec!["x".into()]).unwrap();
    storage.write("step-000000000099-7f3a9c21-g1/shard", vec!["x".into()]).unwrap();
    storage.write("step-000000000001-00000000-g1/manifest.json", vec!["x".into()]).unwrap();
    // Left by a process that was killed while it wrote.
    std::fs::write(
        folder.path().join("checkpoints here/step-000000000027-7f3a9c21-g1/shard#1"),
        "x",
    )
    .unwrap();
    for step in [26, 28, 30] {
        ranks.write(step).unwrap();
    }
    let mut folders: Vec<String> = std::fs::read_dir(folder.path().join("checkpoints here"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    folders.sort();
    let ours = |step: u64| format!("step-{step:012}-7f3a9c21-g1");
    assert_eq!(folders, ["step-000000000001-00000000-g1".to_owned(), ours(28), ours(30), ours(99)]);
}

#[test]
fn in_the_jobs_own_folder_only_runs_from_before_the_job_are_deleted() {
    let scratch = tempfile::tempdir().unwrap();
    let (dir, token) = (scratch.path().join("checkpoints"), scratch.path().join("token"));
    let storage = Storage::open(dir.to_str().unwrap()).unwrap();
    let (fingerprint, retention) =
        (Arc::new(fingerprint()), Retention { keep: 1, exclusive: true });
    let writer = CheckpointWriter::new(storage.clone(), fingerprint.clone(), retention).unwrap();
    let mut ranks =
        Ranks { fingerprint, writers: vec![writer], generation: 1, patience: Duration::ZERO };
    let [earlier, later] =
        ["00000000", "ffffffff"].map(|run| format!("step-000000000022-{run}-g1"));
    let began = SystemTime::now() - Duration::from_secs(60);
    for (name, at) in [(&earlier, began - Duration::from_secs(1)), (&later, SystemTime::now())] {
        storage.write(&format!("{name}/manifest.json"), vec!["x".into()]).unwrap();
        let manifest = std::fs::File::open(dir.join(name).join("manifest.json")).unwrap();
        manifest.set_modified(at).unwrap();
    }
    ranks.write(26).unwrap();
    assert!(dir.join(&earlier).exists(), "the job's directory is gone");
    std::fs::File::create(token).unwrap().set_modified(began).unwrap();
    let own = ranks.write(28).unwrap();
    let left = Name::all(&storage.list_folders(name::PREFIX).unwrap()).into_keys();
    assert_eq!(left.map(|name| name.to_string()).collect::<Vec<_>>(), [later, own]);
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_previous_one_is_used() {
    let (folder, storage) = folder();
    let mut ranks = Ranks::new(&storage, fingerprint(), 3, 9);
    let names = [ranks.write(28).unwrap(), ranks.write(30).unwrap()];
    let newest = folder.path().join("checkpoints here").join(&names[1]);
    let files: Vec<PathBuf> =
        std::fs::read_dir(&newest).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 4);
    for file in files {
        let whole = std::fs::read(&file).unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        let try_with = |bytes: &[u8]| {
            std::fs::write(&file, bytes).unwrap();
            let outcome = begin(&fingerprint(), Some(&storage), None);
            assert_eq!(step_of(&outcome), Some(28));
            let [(damaged, reason)] = &*outcome.1 else { panic!("{:?}", outcome.1) };
            assert!(*damaged == names[1] && reason.starts_with(name), "{damaged} {reason}");
        };
        for at in (0..whole.len()).step_by(13).chain([whole.len() - 1]) {
            let mut flipped = whole.clone();
            flipped[at] ^= 4;
            try_with(&flipped);
        }
        try_with(&[]);
        try_with(&whole[..whole.len() / 2]);
        try_with(&whole[..whole.len() - 1]);
        try_with(&[&whole[..], b" "].concat());
        if name != name::MANIFEST {
            std::fs::remove_file(&file).unwrap();
            let outcome = begin(&fingerprint(), Some(&storage), None);
            assert_eq!(
                (step_of(&outcome), outcome.1[0].1.ends_with("it is missing")),
                (Some(28), true)
            );
        }
        std::fs::write(&file, &whole).unwrap();
    }
    assert_eq!(step_of(&begin(&fingerprint(), Some(&storage), None)), Some(30));
}

#[test]
fn an_attempt_that_fails_on_all_ranks_leaves_no_folder() {
    let (folder, storage) = folder();
    let dir = folder.path().join("checkpoints here/step-000000000028-7f3a9c21-g1");
    // The first rank has made it, and the others write into it.
    std::fs::create_dir_all(&dir).unwrap();
    let mut ranks = Ranks::new(&storage, fingerprint(), 2, 9);
    for (rank, writer) in ranks.writers.iter_mut().enumerate() {
        let (generation, patience) = (Generation(1), Duration::ZERO);
        let shard = OwnShard { step: 28, generation, rank, world_size: 2, patience };
        writer.write(shard, state_at(28), (&[f32::NAN; 4], &[]), None);
        assert!(matches!(next(writer), Completion::Written { result: Err(_), .. }));
    }
    assert!(!dir.exists());
    // A file that is there stays.
    let name = ranks.write(30).unwrap();
    let (parameters, slots) = ([f32::NAN; 4], []);
    let (generation, patience) = (Generation(1), Duration::ZERO);
    let shard = OwnShard { step: 30, generation, rank: 1, world_size: 2, patience };
    ranks.writers[1].write(shard, state_at(30), (&parameters, &slots), None);
    assert!(matches!(next(&mut ranks.writers[1]), Completion::Written { result: Err(_), .. }));
    assert_eq!(storage.list(&name).unwrap().len(), 3);
}

#[test]
fn the_last_checkpoint_is_tried_until_its_folder_takes_it_or_the_job_stops() {
    let (folder, storage) = folder();
    let in_the_way = folder.path().join("checkpoints here");
    let stops = Arc::new(AtomicBool::new(false));
    set_stop_flag(Arc::clone(&stops));
    let mut ranks = Ranks::new(&storage, fingerprint(), 1, 9);
    let mut write = |step, patience, then: &(dyn Fn() + Sync)| {
        std::fs::write(&in_the_way, "a file").unwrap();
        ranks.patience = patience;
        let is_over = AtomicBool::new(patience.is_zero());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let waits = |storage: String| storage.contains(in_the_way.to_str().unwrap());
                while !is_over.load(Ordering::Acquire) && !wait_status().storage.is_some_and(waits)
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
                then();
            });
            let written = ranks.write(step);
            is_over.store(true, Ordering::Release);
            written
        })
    };
    write(28, Duration::ZERO, &|| ()).unwrap_err();
    let patience = Duration::from_secs(600);
    write(30, patience, &|| std::fs::remove_file(&in_the_way).unwrap()).unwrap();
    std::fs::remove_dir_all(&in_the_way).unwrap();
    write(32, patience, &|| stops.store(true, Ordering::Release)).unwrap_err();
}

#[test]
fn a_job_whose_checkpoints_are_all_damaged_starts_from_scratch_and_reports_it() {
    let (folder, storage) = folder();
    let name = Ranks::new(&storage, fingerprint(), 1, 9).write(28).unwrap();
    std::fs::write(folder.path().join("checkpoints here").join(name).join(name::MANIFEST), "{}")
        .unwrap();
    let outcome = begin(&fingerprint(), Some(&storage), None);
    assert_eq!((step_of(&outcome), outcome.1.len()), (None, 1));
}

#[test]
fn a_new_job_resumes_only_from_what_it_is_given() {
    let (_folder, storage) = folder();
    let names = [28, 30].map(|step| Ranks::new(&storage, fingerprint(), 2, 9).write(step).unwrap());
    let new = JobFingerprint { run: "00000001".into(), ..fingerprint() };
    // Both jobs use the same folder by mistake: neither may lose its checkpoints.
    let (refused, _) = begin(&new, Some(&storage), None);
    assert!(
        matches!(&refused, Err(RestoreError::Refused(why))
            if why.contains(&names[1]) && why.contains("--resume-from")),
        "{refused:?}"
    );
    assert_eq!(step_of(&begin(&new, Some(&storage), Some(&storage))), Some(30));
    let one = storage.join(&names[0]);
    let outcome = begin(&new, Some(&storage), Some(&one));
    let name = names[0].clone();
    let expected = Restored { state: state_at(28), name, same_run: false, differences: vec![] };
    assert_eq!(outcome, (Ok(Some(expected)), Vec::new()));
    // Its own checkpoints take precedence, even over later steps of others.
    Ranks::new(&storage, new.clone(), 1, 9).write(29).unwrap();
    assert_eq!(step_of(&begin(&new, Some(&storage), Some(&storage))), Some(29));
    // No checkpoint, or another model: both are detected before training starts.
    let check = |fingerprint: &JobFingerprint, from: &Storage| {
        let (from, passed_over) = (Some(from.clone()), Vec::new());
        check(&Locations { own: None, from, exclusive: false, passed_over }, fingerprint)
    };
    assert_eq!(check(&new, &storage), Ok(()));
    let (scratch, nowhere) = folder();
    let (refused, _) = begin(&new, None, Some(&nowhere));
    let Err(RestoreError::Refused(why)) = &refused else { panic!("{refused:?}") };
    assert!(why.contains("no complete checkpoint"), "{why}");
    let model = scratch.path().join("m.safetensors");
    std::fs::write(&model, "a model").unwrap();
    let model = Storage::open(model.to_str().unwrap()).unwrap();
    let Err(RestoreError::Refused(why)) = check(&new, &model) else { panic!("{model}") };
    assert!(why.ends_with("name the folder of a job's checkpoints"), "{why}");
    assert_eq!(check(&new, &nowhere), begin(&new, None, Some(&nowhere)).0.map(drop));
    let other = JobFingerprint { parameters: 11, ..new };
    assert_eq!(check(&other, &one), begin(&other, None, Some(&one)).0.map(drop));
    let (refused, _) = begin(&other, None, Some(&one));
    assert!(
        matches!(&refused, Err(RestoreError::Refused(why)) if why.contains(&names[0])),
        "{refused:?}"
    );
}

/// A store whose writer is killed after a number of bytes: the current write stays incomplete, and
/// all later writes fail.
#[derive(Debug)]
struct Dying {
    store: Arc<InMemory>,
    bytes_left: AtomicI64,
}

impl std::fmt::Display for Dying {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Dying")
    }
}

fn dead<T>() -> object_store::Result<T> {
    Err(object_store::Error::Generic { store: "Dying", source: "killed".into() })
}

#[async_trait::async_trait]
impl ObjectStore for Dying {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        let bytes = payload.content_length() as i64;
        let left = self.bytes_left.fetch_sub(bytes, Ordering::Relaxed);
        if left >= bytes {
            return self.store.put_opts(location, payload, options).await;
        }
        if left > 0 {
            // Worse than any real store: the object has its name but only a part of its bytes.
            let bytes: bytes::Bytes = payload.into();
            self.store.put_opts(location, bytes.slice(..left as usize).into(), options).await?;
        }
        dead()
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        panic!("these checkpoints are small")
    }

    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        self.store.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        match self.bytes_left.load(Ordering::Relaxed) > 0 {
            true => self.store.delete_stream(locations),
            false => Box::pin(futures::stream::once(async { dead() })),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}

#[test]
fn a_writer_that_dies_at_any_byte_leaves_a_complete_checkpoint() {
    // 1.5 MiB in three shards. The writer is killed at every 64 KiB of them, and at every byte
    // around the end of the manifest.
    let fingerprint = JobFingerprint { parameters: 128 << 10, slots: 256 << 10, ..fingerprint() };
    let whole = {
        let store = Arc::new(InMemory::new());
        let storage = Storage::within(store, Path::default(), "memory");
        Ranks::new(&storage, fingerprint.clone(), 3, 1).write(29).unwrap();
        storage.list("").unwrap().iter().map(|file| file.bytes as i64).sum::<i64>()
    };
    let (mut at, mut survived) = (0, 0);
    while at <= whole + 2 {
        let store = Arc::new(InMemory::new());
        let storage =
            Storage::within(Arc::clone(&store) as Arc<dyn ObjectStore>, Path::default(), "memory");
        Ranks::new(&storage, fingerprint.clone(), 3, 1).write(28).unwrap();
        let dying = Dying { store: Arc::clone(&store), bytes_left: AtomicI64::new(at) };
        let dies = Storage::within(Arc::new(dying), Path::default(), "dying");
        let written = Ranks::new(&dies, fingerprint.clone(), 3, 1).write(29);
        let outcome = begin(&fingerprint, Some(&storage), None);
        assert_eq!(
            step_of(&outcome),
            Some(if written.is_ok() { 29 } else { 28 }),
            "killed at {at}"
        );
        survived += u64::from(written.is_err());
        // Another group resumes from there and deletes old checkpoints.
        let mut next = Ranks { generation: 2, ..Ranks::new(&storage, fingerprint.clone(), 2, 1) };
        next.write(30).unwrap();
        let names: Vec<Name> = Name::all(&storage.list("").unwrap()).into_keys().collect();
        assert_eq!(
            names,
            [Name { step: 30, generation: 2, run: "7f3a9c21".into() }],
            "killed at {at}"
        );
        at += if whole - at < 8 { 1 } else { (64 << 10).min(whole - at - 4) };
    }
    assert!(survived >= 24, "{survived}");
}
