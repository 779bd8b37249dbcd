//! Checkpoints of an optimizer's state that is divided over the workers, and of one that is not.

use elasticdl_tables::SavedChunk;

use super::*;
use crate::checkpoint::load::read_chunks;

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
        let owned = SavedPart::Chunks(owned.iter().map(cut).collect());
        shards_optimizer.then(|| (of_ranks.to_vec(), owned))
    });
    Ranks::new(storage, fingerprint, 2, 3).write_with(30, owned.to_vec())
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
    let owned = owned.map(|owned| Some((of_ranks.clone(), SavedPart::Chunks(owned))));
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
    let owned = owned.map(|owned| Some((of_ranks.clone(), SavedPart::Chunks(owned))));
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
    let owned = Some((vec![vec![0, 1, 2]], SavedPart::Chunks(cut.to_vec())));
    let written = Ranks::new(&storage, fingerprint, 1, 3).write_with(30, vec![owned]);
    assert!(written.unwrap_err().contains("the optimizer's state contains a NaN"));
}
