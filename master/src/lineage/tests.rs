use std::num::{NonZeroU16, NonZeroU64};

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{RecordRange, RestoredCheckpoint, SavedCheckpoint, ValidationSpec};

use super::*;

const RANDOM: OrderName = OrderName { mode: ShuffleMode::Record, seed: 3, block: 0, buffer: 0 };

fn change(generation: u64, at_step: u64, lost: &[u64], joined: &[u64]) -> MembershipChange {
    let ids = |ids: &[u64]| ids.iter().copied().map(WorkerId).collect();
    MembershipChange {
        generation: Generation(generation),
        cause: if generation == 1 { Cause::Start } else { Cause::Lost },
        world_size: 2,
        at_step,
        gap_ms: (generation > 1).then_some(1.0),
        lost: ids(lost),
        joined: ids(joined),
        ..MembershipChange::default()
    }
}

/// A job of three epochs of 60 and 40 records, in steps of 32, that is in its second epoch.
fn facts() -> JobFacts {
    let batch = Batch::Global(NonZeroU64::new(32).unwrap());
    JobFacts {
        spec: JobSpec {
            options: WorkerOptions { epochs: 3, seed: 3, ..WorkerOptions::new("d", batch) },
            ..JobSpec::new("j", "d", 2, batch)
        },
        files: FileList::pack([("d/a.csv", 60), ("d/b.csv", 40)]),
        order: Some(RANDOM),
        begun: Some(Begun::default()),
        progress: JobProgress {
            state: "running".into(),
            has_ended: false,
            counted: 164,
            steps_skipped: 0,
            memberships: vec![change(1, 0, &[], &[1, 2])],
            checkpoints: None,
            records_skipped: None,
            loss: LossSummary::default(),
        },
        checkpoints: None,
        folder: None,
    }
}

fn saved(step: u64) -> CompleteCheckpoint {
    CompleteCheckpoint { step, name: format!("step-{step:012}-0123abcd-g1") }
}

#[test]
fn steps_are_those_of_a_ledger_that_is_gone_through() {
    for (records, batch) in [(1, 1), (10, 10), (10, 3), (100, 32), (7, 100), (64, 64)] {
        for begun in [(0, 0), (3, records / 2), (9, records), (40, 2 * records + records / 3)] {
            let steps = Steps::new(Begun { step: begun.0, records: begun.1 }, records, batch);
            let (mut step, mut counted) = begun;
            while counted < 5 * records {
                let (epoch, start) = ((counted / records) as u32, counted % records);
                let end = records.min(start + batch);
                step += 1;
                let expected = Some(StepRecords { step, epoch, start, end });
                let context = format!("{records} {batch} {begun:?}");
                assert_eq!(steps.records_of(step), expected, "{context}");
                assert!((start..end).all(|at| steps.of(epoch, at) == expected), "{context}");
                counted += end - start;
            }
            assert_eq!(steps.records_of(begun.0), None);
            if let Some(before) = begun.1.checked_sub(1) {
                assert_eq!(steps.of((before / records) as u32, before % records), None);
            }
        }
    }
}

#[test]
fn a_record_has_a_row_for_each_epoch_and_all_records_of_a_step_have_its_number() {
    let facts = facts();
    let order = facts.order().unwrap();
    for (epoch, range, step) in [(0, 96..100, 4), (1, 0..32, 5), (1, 64..96, 7)] {
        let RecordRange { start, end, .. } =
            RecordRange { epoch, start: range.start, end: range.end };
        for (position, record) in (start..end).zip(order.records(RecordRange { epoch, start, end }))
        {
            let lineage = facts.lineage(&RecordName::Number(record)).unwrap();
            let row = &lineage.epochs[epoch as usize];
            assert_eq!((row.position, row.step), (position, Some(step)), "{record}");
            assert_eq!(row.step_positions, Some((start, end)));
            let is_trained = u64::from(epoch) * 100 + position < 164;
            let (state, members) = match is_trained {
                true => (StepState::Trained, Some(vec![WorkerId(1), WorkerId(2)])),
                false => (StepState::ToCome, None),
            };
            assert_eq!((row.state, &row.workers), (state, &members));
            assert_eq!(lineage.epochs.len(), 3);
            let (file, in_file) =
                if record < 60 { ("d/a.csv", record) } else { ("d/b.csv", record - 60) };
            assert_eq!((&*lineage.file, lineage.record_in_file), (file, in_file));
            let name = RecordName::InFile { file: file[2..].into(), record: in_file };
            assert_eq!(facts.lineage(&name), Ok(lineage));
        }
    }
}

/// The state is lost at step 7 with both workers; the new ones begin at step 4.
#[test]
fn a_step_belongs_to_the_last_group_that_committed_it() {
    let mut facts = facts();
    let all_new = MembershipChange { gap_ms: None, ..change(4, 4, &[2, 3], &[5, 6]) };
    // Replaced before its first step.
    let never = MembershipChange { gap_ms: None, ..change(3, 6, &[], &[3]) };
    let before = [change(1, 0, &[], &[1, 2]), change(2, 2, &[1], &[3])];
    facts.progress.memberships = [before[0].clone(), before[1].clone(), all_new, never].into();
    facts.progress.memberships[3].generation = Generation(5);
    let name = saved(4).name;
    let restored = vec![RestoredCheckpoint { step: 4, name, lost_steps: 3 }];
    let newest = SavedCheckpoint { step: 6, name: saved(6).name, bytes: 1 };
    let checkpoints = CheckpointsSummary { newest: Some(newest), restored, ..Default::default() };
    facts.progress.checkpoints = Some(checkpoints);
    facts.checkpoints = Some(vec![saved(2), saved(6)]);
    facts.progress.counted = 300;
    let row = |epoch: u32, position: u64| facts.entry(epoch, position);
    let seen = |row: EpochLineage| {
        let generation = row.generation.map(|generation| generation.0);
        let workers: Vec<u64> = row.workers.iter().flatten().map(|worker| worker.0).collect();
        (row.step.unwrap(), generation, workers, row.was_repeated, row.checkpoint)
    };
    assert_eq!(seen(row(0, 0)), (1, Some(1), vec![1, 2], false, None));
    assert_eq!(seen(row(0, 64)), (3, Some(2), vec![2, 3], false, Some(saved(2))));
    assert_eq!(seen(row(1, 0)), (5, Some(4), vec![5, 6], true, Some(saved(4))));
    assert_eq!(seen(row(2, 0)), (9, Some(4), vec![5, 6], false, Some(saved(6))));
    let notes = facts.lineage(&RecordName::Number(7)).unwrap().notes.join("\n");
    assert!(notes.contains("which of them computed this record is not recorded"), "{notes}");
    // The oldest memberships are not kept.
    facts.progress.memberships.remove(0);
    let row = facts.entry(0, 64);
    assert_eq!((row.generation, row.workers), (Some(Generation(2)), None));
    assert_eq!(facts.entry(0, 0).generation, None);
}

#[test]
fn what_is_not_known_is_said_and_not_guessed() {
    let error = |facts: &JobFacts, name: &RecordName| facts.lineage(name).unwrap_err().to_string();
    let number = RecordName::Number;
    let in_file = |file: &str, record| RecordName::InFile { file: file.into(), record };
    assert!(error(&facts(), &number(100)).contains("100 records, 0 to 99"));
    assert!(error(&facts(), &in_file("b.csv", 40)).contains("no record 40"));
    assert!(error(&facts(), &in_file(".csv", 0)).contains("named .csv"));
    let unordered = JobFacts { order: None, ..facts() };
    assert_eq!(unordered.lineage(&number(0)), Err(LineageError::OrderUnknown));

    let mut per_worker = facts();
    per_worker.spec.options.batch = Batch::PerWorker(NonZeroU64::new(10).unwrap());
    assert!(per_worker.lineage(&number(0)).unwrap().epochs[0].step.is_some());
    per_worker.progress.memberships.push(change(2, 3, &[1], &[3]));
    let lineage = per_worker.lineage(&number(0)).unwrap();
    assert_eq!((lineage.epochs[0].step, lineage.epochs[0].state), (None, StepState::Trained));
    assert!(lineage.notes[0].contains("--minibatch-size"), "{:?}", lineage.notes);

    let mut ended = facts();
    (ended.progress.has_ended, ended.spec.options.max_steps) = (true, Some(5));
    let states = |facts: &JobFacts| {
        let rows = facts.lineage(&number(0)).unwrap().epochs;
        rows.iter().map(|row| row.state).collect::<Vec<_>>()
    };
    assert_eq!(states(&ended)[2], StepState::NotTrained);
    ended.progress.has_ended = false;
    assert_eq!(states(&ended)[2], StepState::NotTrained, "--max-steps");
    ended.spec.options.max_steps = None;
    assert_eq!(states(&ended)[2], StepState::ToCome);
    ended.begun = Some(Begun { step: 50, records: 100 });
    assert_eq!(states(&ended)[0], StepState::Before);
    let row = ended.entry(1, 0);
    assert_eq!((row.step, row.state), (Some(51), StepState::Trained));
}

#[test]
fn validation_data_is_named_within_its_file_and_said_to_be_so() {
    let mut facts = facts();
    let split = Split::new(NonZeroU16::new(100).unwrap(), 3);
    facts.spec.options.validation = Some(ValidationSpec {
        data: "d".into(),
        every: None,
        metric: "loss".into(),
        highest: false,
        patience: None,
        split: NonZeroU16::new(100),
        export_best: None,
    });
    let count = |path: &str, records| split.count(DataPart::Training, path, records);
    let counts = [("d/a.csv", count("d/a.csv", 60)), ("d/b.csv", count("d/b.csv", 40))];
    facts.files = FileList::pack(counts);
    let error = facts.lineage(&RecordName::Number(7)).unwrap_err().to_string();
    assert!(error.contains("give FILE:7"), "{error}");
    let mut trained = 0;
    for record in 0..40 {
        let (part, number) = split.part_of("d/b.csv", record);
        let lineage = facts.lineage(&RecordName::InFile { file: "b.csv".into(), record }).unwrap();
        let is_trained = part == DataPart::Training;
        assert_eq!(lineage.record, is_trained.then_some(counts[0].1 + number));
        assert_eq!(lineage.part == RecordPart::Training, is_trained);
        assert_eq!(lineage.epochs.len(), if is_trained { 3 } else { 0 });
        assert!(is_trained || lineage.notes[0].contains("validation data"));
        trained += u64::from(is_trained);
    }
    assert_eq!(trained, counts[1].1);
}

#[test]
fn a_file_is_named_by_the_end_of_its_path_or_absolutely_however_the_data_was_given() {
    let folder = || Some("/home/u".into());
    let relative = JobFacts { folder: folder(), ..facts() };
    let upwards =
        JobFacts { files: FileList::pack([("../d/a.csv", 9)]), folder: folder(), ..facts() };
    let absolute = JobFacts { files: FileList::pack([("/home/u/d/a.csv", 9)]), ..facts() };
    let dotted =
        JobFacts { files: FileList::pack([("./d/a.csv", 9)]), folder: folder(), ..facts() };
    let is_found = |facts: &JobFacts, name: &str| {
        facts.lineage(&RecordName::InFile { file: name.into(), record: 0 }).is_ok()
    };
    for (facts, whole) in [
        (&relative, "/home/u/d/a.csv"),
        (&upwards, "/home/d/a.csv"),
        (&absolute, "/home/u/d/a.csv"),
        (&dotted, "/home/u/d/a.csv"),
    ] {
        let through = format!("/home/u/x/..{}", whole.replacen("/home", "/../../home", 1));
        for name in ["a.csv", "d/a.csv", "./d/a.csv", whole, &through] {
            assert!(is_found(facts, name), "{name}: {:?}", facts.files.iter().next());
        }
        assert!(!is_found(facts, "/elsewhere/d/a.csv"));
    }
    assert!(!is_found(&facts(), "/home/u/d/a.csv"), "the job's folder is not known");
}

#[test]
fn the_order_is_shown_as_users_write_it() {
    let lineage = facts().lineage(&RecordName::Number(0)).unwrap();
    let shown = serde_json::json!({"mode": "record", "seed": 3, "block": 0, "buffer": 0});
    assert_eq!(serde_json::to_value(lineage).unwrap()["order"], shown);
}

#[test]
fn a_step_that_the_job_has_not_made_is_refused_with_the_last_one_that_it_has() {
    let mut facts = facts();
    let refused = |facts: &JobFacts, step| facts.made(step).unwrap_err().to_string();
    assert_eq!(facts.made(6).map(|made| (made.epoch, made.start, made.end)), Ok((1, 32, 64)));
    assert_eq!(facts.last_made(), Some(6));
    assert!(refused(&facts, 7).contains("is at step 6"), "{}", refused(&facts, 7));
    facts.progress.has_ended = true;
    assert!(refused(&facts, 500).contains("has ended with step 6"), "{}", refused(&facts, 500));
    facts.begun = Some(Begun { step: 50, records: 100 });
    assert!(refused(&facts, 50).contains("with the state of step 50"), "{}", refused(&facts, 50));
    assert_eq!((facts.made(51).is_ok(), facts.last_made()), (true, Some(52)));
}

#[test]
fn another_jobs_checkpoints_in_the_same_folder_are_not_this_jobs() {
    let mut facts = facts();
    let other = |step| CompleteCheckpoint { step, name: format!("step-{step:012}-89abcdef-g1") };
    assert!(!facts.is_own(&saved(2)), "no checkpoint is recorded");
    let newest = SavedCheckpoint { step: 4, name: saved(4).name, bytes: 1 };
    let restored = vec![RestoredCheckpoint { step: 1, name: other(1).name, lost_steps: 0 }];
    let known = CheckpointsSummary { newest: Some(newest), restored, ..Default::default() };
    facts.progress.checkpoints = Some(known);
    let own = [saved(2), other(3), saved(4), other(1)].map(|known| facts.is_own(&known));
    assert_eq!(own, [true, false, true, true]);
}

#[test]
fn other_data_and_another_order_are_told_apart_from_those_of_the_job() {
    let job = facts();
    let differs = |other: JobFacts| job.difference_from(&other);
    assert_eq!(differs(facts()), None);
    let with = |files: &[(&str, u64)]| JobFacts {
        files: FileList::pack(files.iter().copied()),
        ..facts()
    };
    assert_eq!(differs(with(&[("/elsewhere/a.csv", 60), ("/elsewhere/b.csv", 40)])), None);
    for (other, why) in [
        (with(&[("d/a.csv", 60), ("d/b.csv", 41)]), "d/b.csv with 40 records"),
        (with(&[("d/a.csv", 60), ("d/c.csv", 40)]), "d/c.csv with 40"),
        (with(&[("d/a.csv", 60)]), "2 files, and this one 1"),
        (JobFacts { order: Some(OrderName { seed: 4, ..RANDOM }), ..facts() }, "--seed 4"),
    ] {
        let told = differs(other).unwrap();
        assert!(told.contains(why), "{why:?} is not in: {told}");
    }
}
