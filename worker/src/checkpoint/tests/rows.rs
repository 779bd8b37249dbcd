//! Rows of tables in checkpoints.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_tables::{
    Ids, Initialization, Member, Owned, RowGradients, RowOptimizer, SHARDS, Settings, StepCommit,
    Table,
};

use super::*;

fn tables() -> Vec<Table> {
    let adagrad = RowOptimizer::adagrad(0.5);
    vec![Table::new("user", 3).optimized(adagrad), Table::new("item", 1)]
}

pub(super) fn with_tables() -> JobFingerprint {
    JobFingerprint { tables: tables(), ..fingerprint() }
}

pub(super) fn members(world_size: usize) -> Vec<Member> {
    let member = |worker| Member::new(worker, worker);
    (1..=world_size as u64).map(member).collect()
}

/// Ranks without a group.
pub(super) fn ranks(world_size: usize) -> Vec<Owned> {
    let settings = Settings {
        seed: fingerprint().seed,
        shards: SHARDS,
        copies: 2,
        lag: 0,
        copy_bytes: 1,
        copy_rate: 0,
    };
    let owned = |member: &Member| Owned::new(member.worker, settings, tables());
    members(world_size).iter().map(owned).collect()
}

/// Ranks that have trained for one step, in which each touched rows of its own and common ones.
fn trained(world_size: usize) -> Vec<Owned> {
    let mut ranks = ranks(world_size);
    ranks.iter_mut().for_each(|rank| rank.create(1, members(world_size)));
    step(&mut ranks);
    ranks
}

fn step(ranks: &mut [Owned]) {
    step_with(ranks, ids);
}

/// A step in which each rank, by its number, touches the rows of these ids.
pub(super) fn step_with(ranks: &mut [Owned], ids: impl Fn(u64) -> Ids) {
    let turned = |sent: Vec<Vec<Vec<u8>>>| {
        let to = |rank: usize| sent.iter().map(|from| from[rank].clone()).collect::<Vec<_>>();
        (0..sent.len()).map(to).collect::<Vec<_>>()
    };
    let ids: Vec<Ids> = (0..ranks.len() as u64).map(&ids).collect();
    let requests = turned(ranks.iter().zip(&ids).map(|(rank, ids)| rank.requests(ids)).collect());
    let answers = ranks.iter().zip(&requests).map(|(rank, asked)| rank.replies(asked).unwrap());
    let replies = turned(answers.collect());
    let mut pushes = Vec::new();
    for ((rank, ids), replies) in ranks.iter_mut().zip(&ids).zip(&replies) {
        let mut rows = rank.receive(ids, replies).unwrap();
        (0..2).for_each(|table| rows.of(table).1.fill(1.5));
        let mut gradients = RowGradients::default();
        gradients.add(&tables(), ids.clone(), rows);
        pushes.push(rank.pushes(&gradients, Duration::ZERO));
    }
    for (rank, pushes) in ranks.iter_mut().zip(turned(pushes)) {
        rank.stage(&pushes).unwrap();
        assert!(rank.commit(StepCommit { generation: 1, divisor: 4.0, is_applied: true }));
    }
}

fn ids(rank: u64) -> Ids {
    let mut ids = Ids::new(2);
    ids.begin_record();
    (0..200).for_each(|id| _ = ids.push(0, id * 7));
    (0..50).for_each(|id| _ = ids.push(1, rank * 1000 + id));
    ids
}

pub(super) type Rows = BTreeMap<(usize, u64), (u32, Vec<f32>)>;

pub(super) fn rows(ranks: &[Owned]) -> Rows {
    let of_table = |rank: &Owned, table| {
        let row = |(id, touches, row): (u64, u32, &[f32])| ((table, id), (touches, row.to_vec()));
        rank.rows(table).map(row).collect::<Vec<_>>()
    };
    ranks.iter().flat_map(|rank| [of_table(rank, 0), of_table(rank, 1)].concat()).collect()
}

pub(super) fn saved(ranks: &[Owned]) -> Vec<Option<SavedShards>> {
    ranks.iter().map(|rank| Some(rank.save())).collect()
}

/// Ranks whose rows are those of the checkpoint of this name.
pub(super) fn read(
    storage: &Storage,
    name: &str,
    world_size: usize,
) -> Result<Vec<Owned>, RestoreError> {
    let locations = Locations {
        own: Some(storage.clone()),
        from: None,
        exclusive: false,
        passed_over: Vec::new(),
    };
    let mut ranks = ranks(world_size);
    for rank in &mut ranks {
        let mut shards = Vec::new();
        let mut take = |number, bytes: &[u8]| {
            shards.push(rank.decode(number, bytes).map_err(|error| error.to_string())?);
            Ok(())
        };
        let wanted = rank.shards_at_start(&members(world_size));
        read_rows(&locations, &with_tables(), (name, true), &wanted, &mut take)?;
        rank.restore(30, (9, members(world_size)), shards);
    }
    Ok(ranks)
}

#[test]
fn rows_are_read_by_any_number_of_ranks_as_they_were_when_they_were_saved() {
    for (wrote, reads) in [(1, 3), (3, 1), (2, 5), (5, 2)] {
        let (_folder, storage) = folder();
        let mut before = trained(wrote);
        let (expected, saved) = (rows(&before), saved(&before));
        // Training goes on before anything is written.
        step(&mut before);
        assert!(rows(&before) != expected);
        let mut writers = Ranks::new(&storage, with_tables(), wrote, 3);
        let name = writers.write_with_rows(30, saved).unwrap();
        assert_eq!(step_of(&begin(&with_tables(), Some(&storage), None)), Some(30));
        let after = read(&storage, &name, reads).unwrap();
        assert!(rows(&after) == expected, "{wrote} to {reads}");
        assert!(after.iter().all(|rank| rank.at_risk() == 0));
        let manifest: serde_json::Value =
            serde_json::from_slice(&storage.join(&name).read("manifest.json").unwrap()).unwrap();
        let touches = wrote * 250;
        assert_eq!(manifest["rows"]["touches"], touches);
        assert_eq!(after.iter().map(|rank| rank.touches()).sum::<u64>(), touches as u64);
    }
}

#[test]
fn a_file_of_rows_that_is_missing_or_changed_is_found() {
    let (folder, storage) = folder();
    let write = |step| {
        let mut writers = Ranks::new(&storage, with_tables(), 2, 3);
        writers.write_with_rows(step, saved(&trained(2))).unwrap()
    };
    let (older, newer) = (write(30), write(31));
    let path =
        |name: &str| folder.path().join("checkpoints here").join(name).join(name::rows(1, 2));
    let whole = std::fs::read(path(&newer)).unwrap();
    let change = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(path(&newer), bytes).unwrap();
    };
    // A shard is read by those ranks alone that hold it.
    change(whole.len() - 1);
    let RestoreError::Refused(error) = read(&storage, &newer, 1).unwrap_err() else { panic!() };
    assert!(error.contains("rows-00001-of-00002: shard") && error.contains("changed"), "{error}");
    // The rest is found before any state is taken.
    let passed_over = || {
        let outcome = begin(&with_tables(), Some(&storage), None);
        assert_eq!(step_of(&outcome), Some(30));
        outcome.1[0].1.clone()
    };
    change(0);
    assert!(passed_over().contains("the digest of its index does not match"));
    std::fs::write(path(&newer), &whole[1..]).unwrap();
    assert!(passed_over().contains("bytes, not"));
    std::fs::remove_file(path(&newer)).unwrap();
    assert!(passed_over().contains("rows-00001-of-00002: it is missing"));
    assert!(read(&storage, &older, 2).is_ok());
}

#[test]
fn a_job_whose_tables_differ_is_refused_with_what_differs() {
    let (_folder, storage) = folder();
    let mut writers = Ranks::new(&storage, with_tables(), 1, 3);
    writers.write_with_rows(30, saved(&trained(1))).unwrap();
    let refused = |fingerprint: JobFingerprint| match begin(&fingerprint, Some(&storage), None).0 {
        Err(RestoreError::Refused(error)) => error,
        other => panic!("{other:?}"),
    };
    let other = |table: Table| {
        let tables = vec![table, tables().remove(1)];
        refused(JobFingerprint { tables, ..with_tables() })
    };
    let adagrad = RowOptimizer::adagrad(0.5);
    for (found, expected) in [
        (refused(fingerprint()), "it has 2 tables, and this model has 0"),
        (refused(JobFingerprint { seed: 8, ..with_tables() }), "give --seed 7"),
        (other(Table::new("users", 3).optimized(adagrad)), "table \"user\" where this model has"),
        (other(Table::new("user", 4).optimized(adagrad)), "rows of 3 numbers, and here of 4"),
        (other(Table::new("user", 3)), "table \"user\" is Adagrad, and here SGD"),
        (
            other(Table::new("user", 3).optimized(adagrad).initialized(Initialization::Zeros)),
            "begin as Uniform { bound: 0.05 }, and here as Zeros",
        ),
    ] {
        assert!(found.contains(expected), "{found}");
    }
    // A learning rate may change.
    let tables =
        vec![Table::new("user", 3).optimized(RowOptimizer::adagrad(0.1)), tables().remove(1)];
    let job = JobFingerprint { tables, ..with_tables() };
    assert_eq!(step_of(&begin(&job, Some(&storage), None)), Some(30));
    let (_folder, storage) = folder();
    Ranks::new(&storage, fingerprint(), 1, 3).write(30).unwrap();
    let error = begin(&with_tables(), Some(&storage), None).0.unwrap_err();
    assert!(format!("{error:?}").contains("it has no tables, and this model has"), "{error:?}");
}

#[test]
fn a_table_that_is_not_finite_is_not_written() {
    let (_folder, storage) = folder();
    let mut ranks = trained(1);
    let ids = ids(0);
    let replies = [ranks[0].replies(&ranks[0].requests(&ids)).unwrap().remove(0)];
    let mut received = ranks[0].receive(&ids, &replies).unwrap();
    received.of(1).1.fill(f32::INFINITY);
    let mut gradients = RowGradients::default();
    gradients.add(&tables(), ids, received);
    let pushes = ranks[0].pushes(&gradients, Duration::ZERO);
    ranks[0].stage(&pushes).unwrap();
    ranks[0].commit(StepCommit { generation: 1, divisor: 1.0, is_applied: true });
    let mut writers = Ranks::new(&storage, with_tables(), 1, 3);
    let error = writers.write_with_rows(30, saved(&ranks)).unwrap_err();
    assert!(error.contains("a table contains a NaN"), "{error}");
    assert_eq!(step_of(&begin(&with_tables(), Some(&storage), None)), None);
}
