//! Checkpoints of an optimizer's state that is divided over the workers, and of one that is not.

use elasticdl_tables::{ComparedShards, SavedChunk};

use super::*;
use crate::checkpoint::load::read_chunks;
use crate::external::StatePart;

/// A job whose optimizer has three chunks.
fn job(shards_optimizer: bool) -> JobFingerprint {
    JobFingerprint { parameters: 10_000, slots: 20_000, shards_optimizer, ..fingerprint() }
}

/// Writes a checkpoint of step 30 with two ranks, which own the chunks of these numbers if the
/// state is divided.
fn write(storage: &Storage, shards_optimizer: bool) -> Result<String, String> {
    let fingerprint = job(shards_optimizer);
    let slots = state(&fingerprint, 30).1;
    let of_ranks = [vec![0, 2], vec![1]];
    let owned = of_ranks.clone().map(|owned| {
        let cut = |&chunk: &u32| fingerprint.layout().cut(chunk, &slots);
        let owned = without_copies(owned.iter().map(cut).collect());
        shards_optimizer.then(|| (of_ranks.to_vec(), owned))
    });
    Ranks::new(storage, fingerprint, 2, 3).write_with(30, owned.to_vec())
}

/// A part of these chunks, of which there are no copies.
fn without_copies(owned: Vec<SavedChunk>) -> SavedPart {
    SavedPart::Chunks(owned, ComparedShards::default())
}

fn locations(own: &Storage) -> Locations {
    Locations { own: Some(own.clone()), from: None, exclusive: false, passed_over: Vec::new() }
}

/// These chunks of a checkpoint.
fn chunks(own: &Storage, name: &str, wanted: &[u32]) -> Result<Vec<SavedChunk>, RestoreError> {
    read_chunks(&locations(own), &job(true), (name, true), wanted)
}

#[test]
fn a_divided_state_and_a_whole_one_are_read_by_jobs_of_either_kind() {
    for writes_chunks in [true, false] {
        let (_folder, storage) = folder();
        let name = write(&storage, writes_chunks).unwrap();
        // All of it, for a job whose workers hold all.
        assert_eq!(step_of(&begin(&job(false), Some(&storage), None)), Some(30));
        // The parameters alone for the first rank of one whose workers do not, and chunks for each.
        let (expected, slots) = state(&job(true), 30);
        let mut parameters = vec![f32::NAN; 10_000];
        let (locations, job) = (locations(&storage), job(true));
        let restored = restore(&locations, &job, &mut parameters, &mut [], &mut |_, _| ()).unwrap();
        assert_eq!(restored.unwrap().state, state_at(30));
        assert!(parameters == expected);
        for wanted in [&[0, 1, 2][..], &[1], &[0, 2], &[]] {
            let found = chunks(&storage, &name, wanted).unwrap();
            let mut pasted = vec![0.0; 20_000];
            let mut expected = pasted.clone();
            for found in &found {
                job.layout().paste(found.number(), found.slots(), &mut pasted);
            }
            for &chunk in wanted {
                job.layout().paste(chunk, job.layout().cut(chunk, &slots).slots(), &mut expected);
            }
            assert!(found.len() == wanted.len() && pasted == expected, "{wanted:?}");
        }
        let mut parameters = vec![f32::NAN; 10_000];
        assert_eq!(load_parameters(&storage.join(&name), &mut parameters), Ok(()));
    }
}

/// A job as that of [`job`], whose chunks have the parameters.
fn half_job() -> JobFingerprint {
    JobFingerprint { chunks_have_parameters: true, ..job(true) }
}

/// The state of a job at step 30: the parameters, followed by the optimizer's state.
fn whole() -> Vec<f32> {
    let (parameters, slots) = state(&job(true), 30);
    [parameters, slots].concat()
}

#[test]
fn chunks_with_the_parameters_are_read_exactly_by_jobs_of_each_kind_and_made_of_theirs() {
    let (_folder, storage) = folder();
    let (fingerprint, whole) = (half_job(), whole());
    let cut = |chunk: u32| fingerprint.layout().cut(chunk, &whole);
    let of_ranks = vec![vec![0, 2], vec![1]];
    let owned = [vec![cut(0), cut(2)], vec![cut(1)]];
    let owned = owned.map(|owned| Some((of_ranks.clone(), without_copies(owned))));
    let name = Ranks::new(&storage, half_job(), 2, 3).write_with(30, owned.to_vec()).unwrap();
    assert_eq!(step_of(&begin(&job(false), Some(&storage), None)), Some(30));
    let (expected, _) = state(&job(true), 30);
    for reads in [job(true), half_job()] {
        let (mut parameters, mut none) = (vec![f32::NAN; 10_000], vec![]);
        let locations = locations(&storage);
        restore(&locations, &reads, &mut parameters, &mut none, &mut |_, _| ()).unwrap().unwrap();
        assert!(parameters == expected);
    }
    let mut parameters = vec![f32::NAN; 10_000];
    assert_eq!(load_parameters(&storage.join(&name), &mut parameters), Ok(()));
    assert!(parameters == expected);
    // Chunks with the parameters and without, of a checkpoint of each kind.
    let (_folder, others) = folder();
    let written = [(&storage, name), (&others, write(&others, true).unwrap())];
    let (_folder, others) = folder();
    let whole_ones = (&others, write(&others, false).unwrap());
    for (storage, name) in written.iter().chain([&whole_ones]) {
        for (reads, first) in [(half_job(), 0), (job(true), 10_000)] {
            let locations = locations(storage);
            let found = read_chunks(&locations, &reads, (name, true), &[1, 2]).unwrap();
            for chunk in &found {
                let expected = reads.layout().cut(chunk.number(), &whole[first..]);
                assert!(chunk.slots() == expected.slots(), "{name}, chunk {}", chunk.number());
            }
            assert_eq!(found.len(), 2);
        }
    }
}

/// A job as that of [`job`], of a program whose first 100 parameters have no state, and whose
/// optimizer has 40 floats that are not divided.
fn job_of_program() -> JobFingerprint {
    JobFingerprint { slots: 2 * 9_900 + 40, whole: 40, first: 100, ..job(true) }
}

#[test]
fn a_state_that_is_divided_in_part_is_read_by_jobs_whose_state_is() {
    let (_folder, storage) = folder();
    let (fingerprint, (expected, slots)) = (job_of_program(), state(&job_of_program(), 30));
    let (divided, whole) = slots.split_at(2 * 9_900);
    let cut = |chunk: u32| fingerprint.layout().cut(chunk, divided);
    let of_ranks = vec![vec![0, 2], vec![1]];
    let owned = [vec![cut(0), cut(2)], vec![cut(1)]];
    let owned = owned.map(|owned| Some((of_ranks.clone(), without_copies(owned))));
    let name = Ranks::new(&storage, job_of_program(), 2, 3).write_with(30, owned.to_vec()).unwrap();
    let locations = locations(&storage);
    let (mut parameters, mut read) = (vec![f32::NAN; 10_000], vec![f32::NAN; 40]);
    restore(&locations, &fingerprint, &mut parameters, &mut read, &mut |_, _| ()).unwrap().unwrap();
    assert!(parameters == expected && read == whole);
    let found = read_chunks(&locations, &fingerprint, (&name, true), &[0, 2]).unwrap();
    assert_eq!(found.len(), 2);
    for chunk in found {
        assert!(chunk.slots() == cut(chunk.number()).slots(), "chunk {}", chunk.number());
    }
    // A job without the option has this state in another form, and one of candle in none.
    let without = JobFingerprint { shards_optimizer: false, whole: 0, first: 0, ..fingerprint };
    let mut slots = vec![0.0; without.slots];
    let restored = restore(&locations, &without, &mut parameters, &mut slots, &mut |_, _| ());
    let Err(RestoreError::Refused(error)) = restored else { panic!("{restored:?}") };
    assert!(error.contains("start this job with --shard-optimizer"), "{error}");
}

#[test]
fn a_damaged_chunk_is_refused_by_the_jobs_that_need_it() {
    let (folder, storage) = folder();
    let name = write(&storage, true).unwrap();
    let path = folder.path().join("checkpoints here").join(&name).join(name::rows(0, 2));
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert!(chunks(&storage, &name, &[0, 1]).is_ok());
    let Err(RestoreError::Refused(error)) = chunks(&storage, &name, &[2]) else { panic!() };
    assert!(error.contains("chunk 2 has changed"), "{error}");
    let (restored, damaged) = begin(&job(false), Some(&storage), None);
    assert_eq!(restored, Ok(None));
    assert!(damaged[0].1.contains("chunk 2 has changed"), "{damaged:?}");
    // A file that is cut short is found before any chunk is read.
    std::fs::write(&path, &bytes[..last]).unwrap();
    let mut damaged = 0;
    let mut parameters = vec![0.0; 10_000];
    let restored =
        restore(&locations(&storage), &job(true), &mut parameters, &mut [], &mut |_, _| {
            damaged += 1;
        });
    assert_eq!((restored, damaged), (Ok(None), 1));
}

#[test]
fn a_manifest_names_each_chunk_once() {
    let (folder, storage) = folder();
    let name = write(&storage, true).unwrap();
    let manifest =
        std::fs::read(folder.path().join("checkpoints here").join(&name).join("manifest.json"));
    let manifest = manifest::Manifest::decode(&manifest.unwrap()).unwrap();
    let with = |change: fn(&mut Vec<Vec<u32>>)| {
        let mut manifest = manifest.clone();
        let optimizer = manifest.optimizer.as_mut().unwrap();
        let mut shards: Vec<_> = optimizer.files.iter().map(|file| file.shards.clone()).collect();
        change(&mut shards);
        optimizer.files.iter_mut().zip(shards).for_each(|(file, shards)| file.shards = shards);
        manifest::Manifest::decode(&manifest.encode()).map(drop)
    };
    assert_eq!(with(|_| ()), Ok(()));
    assert!(with(|shards| shards[1][0] = 0).unwrap_err().contains("contains shard 0"));
    assert!(with(|shards| shards[1][0] = 3).unwrap_err().contains("contains shard 3"));
    assert!(with(|shards| shards[1].clear()).is_err());
    assert!(with(|shards| shards[1].push(3)).unwrap_err().contains("not 3"));
}

#[test]
fn a_state_that_is_not_finite_is_not_written() {
    let (_folder, storage) = folder();
    let fingerprint = job(true);
    let slots = vec![f32::NAN; 20_000];
    let cut = [0, 1, 2].map(|chunk| fingerprint.layout().cut(chunk, &slots));
    let owned = Some((vec![vec![0, 1, 2]], without_copies(cut.to_vec())));
    let written = Ranks::new(&storage, fingerprint, 1, 3).write_with(30, vec![owned]);
    assert!(written.unwrap_err().contains("the optimizer's state contains a NaN"));
}

fn part(name: &str, at: usize, len: usize, fill: Option<f32>) -> StatePart {
    StatePart { name: name.into(), at, len, fill }
}

/// What lies where in the state of a job of a program that is not divided: a number, which is
/// followed by padding, the state of two parameters, of which the first is frozen, and text. As of
/// [`job_of_program`], but the text may have another length.
fn whole_job_of_program(text: usize) -> JobFingerprint {
    let parts = vec![
        part("step", 0, 1, None),
        part("sum of frozen", 4, 100, Some(0.5)),
        part("m", 104, 9_900, None),
        part("v", 10_004, 9_900, None),
        part("text", 19_904, text, Some(0.0)),
    ];
    let divided = JobFingerprint { shards_optimizer: false, whole: 0, first: 0, ..fingerprint() };
    JobFingerprint { parameters: 10_000, slots: 19_904 + text, parts, ..divided }
}

/// A job as that of [`job_of_program`], with the parts of [`whole_job_of_program`].
fn divided_job_of_program() -> JobFingerprint {
    let parts = vec![
        part("step", 19_800, 1, None),
        part("sum of frozen", 0, 0, Some(0.5)),
        part("v", 0, 9_900, None),
        part("m", 9_900, 9_900, None),
        part("text", 19_804, 36, Some(0.0)),
    ];
    JobFingerprint { parts, ..job_of_program() }
}

/// Restores the whole state of a job, or what is not divided.
fn restored(storage: &Storage, job: &JobFingerprint) -> Result<Vec<f32>, RestoreError> {
    let len = if job.shards_optimizer { job.whole } else { job.slots };
    let (mut parameters, mut slots) = (vec![f32::NAN; 10_000], vec![f32::NAN; len]);
    let damaged = &mut |name: &str, reason: &str| panic!("{name}: {reason}");
    restore(&locations(storage), job, &mut parameters, &mut slots, damaged)?.unwrap();
    assert!(parameters == state(job, 30).0);
    Ok(slots)
}

#[test]
fn a_state_that_says_what_lies_where_is_read_by_jobs_in_which_it_lies_elsewhere() {
    let (whole_job, job) = (whole_job_of_program(40), divided_job_of_program());
    // Of a whole state: what is not divided, and each chunk.
    let (_folder, storage) = folder();
    let saved = state(&whole_job, 30).1;
    let name = Ranks::new(&storage, whole_job.clone(), 3, 3).write(30).unwrap();
    let read = restored(&storage, &job).unwrap();
    assert!(read == [&[saved[0], 0.0, 0.0, 0.0], &saved[19_904..19_940]].concat());
    let read = read_chunks(&locations(&storage), &job, (&name, true), &[0, 1, 2]).unwrap();
    let divided = [&saved[10_004..19_904], &saved[104..10_004]].concat();
    for (chunk, number) in read.iter().zip(0..) {
        assert!(chunk.slots() == job.layout().cut(number, &divided).slots(), "chunk {number}");
    }
    // Of a divided state: all of it, also where there is less room for text.
    let (_folder, storage) = folder();
    let saved = state(&job, 30).1;
    let owned = |owned: &[u32]| {
        let cut = |&chunk: &u32| job.layout().cut(chunk, &saved[..19_800]);
        without_copies(owned.iter().map(cut).collect())
    };
    let of_ranks = vec![vec![2], vec![0, 1]];
    let parts = of_ranks.iter().map(|chunks| Some((of_ranks.clone(), owned(chunks)))).collect();
    let name = Ranks::new(&storage, job.clone(), 2, 3).write_with(30, parts).unwrap();
    for text in [30, 40] {
        let read = restored(&storage, &whole_job_of_program(text)).unwrap();
        let mut expected = vec![0.0; 19_904 + text];
        expected[0] = saved[19_800];
        expected[4..104].fill(0.5);
        expected[104..10_004].copy_from_slice(&saved[9_900..19_800]);
        expected[10_004..19_904].copy_from_slice(&saved[..9_900]);
        expected[19_904..][..text.min(36)].copy_from_slice(&saved[19_804..][..text.min(36)]);
        assert!(read == expected, "{text}");
    }
    assert!(restored(&storage, &job).unwrap() == saved[19_800..]);
    // One that declares more floats than its files have asks for no memory.
    let path = format!("{name}/manifest.json");
    let manifest = storage.read(&path).unwrap();
    let mut manifest = manifest::Manifest::decode(&manifest).unwrap();
    manifest.slots = 40 + 9_900 * (1 << 40);
    storage.write(&path, vec![manifest.encode().into()]).unwrap();
    let (mut parameters, mut slots) = (vec![0.0; 10_000], vec![0.0; whole_job.slots]);
    let mut damaged = String::new();
    let note = &mut |_: &str, reason: &str| damaged = reason.into();
    let found = restore(&locations(&storage), &whole_job, &mut parameters, &mut slots, note);
    assert_eq!(found, Ok(None));
    assert!(damaged.contains("bytes can't have"), "{damaged}");
}

#[test]
fn a_state_with_other_parts_is_refused_by_their_names() {
    let (_folder, storage) = folder();
    let name = Ranks::new(&storage, whole_job_of_program(40), 1, 3).write(30).unwrap();
    let refused = |change: fn(&mut Vec<StatePart>)| {
        let mut job = divided_job_of_program();
        change(&mut job.parts);
        let chunks = read_chunks(&locations(&storage), &job, (&name, true), &[0]).map(drop);
        match (restored(&storage, &job).map(drop), chunks) {
            (Err(RestoreError::Refused(error)), Err(RestoreError::Refused(_))) => error,
            other => panic!("{other:?}"),
        }
    };
    assert!(refused(|parts| drop(parts.remove(2))).contains("has v, and this job's has not"));
    assert!(refused(|parts| parts[2].name = "w".into()).contains("has v, and this job's has not"));
    assert!(
        refused(|parts| parts.push(part("max", 0, 1, None)))
            .contains("lacks max, which this job's has; both must have the same")
    );
    assert!(refused(|p| p[3].len = 9).contains("m has 9900 floats in its state, and 9 in"));
    let older = JobFingerprint { parts: Vec::new(), ..whole_job_of_program(40) };
    let older = Ranks::new(&storage, older, 1, 4).write(31).unwrap();
    let job = divided_job_of_program();
    match read_chunks(&locations(&storage), &job, (&older, true), &[0]).map(drop) {
        Err(RestoreError::Refused(error)) => {
            assert!(error.contains("does not say what lies where"))
        }
        other => panic!("{other:?}"),
    }
    let manifest = storage.read(&format!("{name}/manifest.json")).unwrap();
    let manifest = manifest::Manifest::decode(&manifest).unwrap();
    let with = |change: fn(&mut manifest::Manifest)| {
        let mut manifest = manifest.clone();
        change(&mut manifest);
        manifest::Manifest::decode(&manifest.encode()).map(drop).unwrap_err()
    };
    assert!(with(|m| m.parts[4].len = 41).contains("text is not within its optimizer's state"));
    assert!(with(|m| m.parts[4].at = usize::MAX).contains("text is not within"));
}
