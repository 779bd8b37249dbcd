//! Rows of tables, each on two workers, are touched exactly once by each record under random
//! `kill -9`, and when jobs start from checkpoints.

use std::path::PathBuf;
use std::time::Duration;

use elasticdl_proto::{RowTouchesSummary, TablesStatus, WorkerStatus};
use elasticdl_tests::{Ended, JobFixture, Running, exported_rows, send, touches_without_row};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::PROGRAMS;

/// Starts a job whose model has a table, with so many copies of each row.
fn start(seed: u64, (workers, replicas): (u32, u32)) -> Running {
    let fixture = fixture(workers);
    let command = fixture.command(seed).option("checkpoint-dir", "none");
    let command = command.option("table-replicas", replicas.to_string());
    let mut job = command.start().keeping(fixture.folder);
    job.wait_for_first_steps();
    job
}

/// A job of this many workers whose model has a table.
fn fixture(workers: u32) -> JobFixture {
    JobFixture { program_options: &["--tables"], ..JobFixture::new(PROGRAMS, workers) }
}

/// Asserts that each row was touched as often as there are epochs, and each record counted.
fn assert_exact(ended: &Ended, context: &str) {
    ended.assert_exact(context);
    let expected = 12_000;
    let exact = RowTouchesSummary { expected, counted: expected, missing: 0, repeated: 0 };
    assert_eq!(ended.summary().row_touches, Some(exact), "{context}");
}

#[test]
fn rows_survive_when_all_workers_are_killed_while_they_write_what_has_changed() {
    let program_options = &["--tables", "--short-lived"];
    // So slow that the job outlasts the kills.
    let first = JobFixture { micros_per_record: 3000, program_options, ..fixture(3) };
    let dir = first.folder.path().join("checkpoints");
    let command = first.command(1).option("checkpoint-dir", dir.to_str().unwrap());
    let mut job = command.option("checkpoint-every", "2").start();
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    // Most of the time, a checkpoint is being written.
    for saved in [3, 8, 13] {
        job.wait_for_checkpoints(saved);
        std::thread::sleep(Duration::from_millis(rng.random_range(0..50)));
        job.signal_workers(Signal::KILL);
    }
    job.wait_for_checkpoints(18);
    job.signal(Signal::TERM);
    let ended = job.wait();
    ended.assert_outcome(143, "stopped");
    assert!(ended.summary().checkpoints.as_ref().unwrap().restored.len() >= 3, "{}", ended.output);
    let folders = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
    let manifests = folders.filter_map(|f| std::fs::read_to_string(f.join("manifest.json")).ok());
    assert!(manifests.into_iter().any(|text| text.contains("\"base\":\"step-")), "no changes");
    for workers in [1, 4] {
        let next = JobFixture { micros_per_record: 20, program_options, ..fixture(workers) };
        let ended = next.command(1).option("resume-from", dir.to_str().unwrap()).run();
        assert_exact(&ended, &format!("{workers} workers"));
    }
}

#[test]
fn a_job_goes_on_from_rows_that_another_number_of_workers_has_written() {
    let first = JobFixture { micros_per_record: 200, ..fixture(3) };
    let dir = first.folder.path().join("checkpoints");
    let dir = dir.to_str().unwrap();
    let command = first.command(1).option("checkpoint-dir", dir);
    let mut job = command.option("checkpoint-every", "15").start();
    job.wait_for("the status of rows", |status| {
        let all_hold_rows = status.members().filter(|member| member.table_bytes > Some(0)).count();
        let has_copies = |tables: TablesStatus| {
            tables.shards_at_risk == 0 && tables.rows.min(tables.touches) > 0
        };
        all_hold_rows == 3 && status.tables.is_some_and(has_copies)
    });
    job.signal(Signal::TERM);
    job.wait().assert_outcome(143, "stopped");
    for workers in [1, 5] {
        let next = JobFixture { micros_per_record: 20, ..fixture(workers) };
        let ended = next.command(1).option("resume-from", dir).run();
        assert_exact(&ended, &format!("{workers} workers"));
    }
    let without = JobFixture { program_options: &[], ..fixture(2) };
    let ended = without.command(1).option("resume-from", dir).run();
    ended.assert_outcome(2, "refused");
    assert!(ended.output.contains("it has 1 tables, and this model has 0"), "{}", ended.output);
}

/// Each worker that fails at the record leaves its rows to those that remain, and the last one
/// stores them; so do those that remain when the job gives up.
#[test]
fn a_record_at_which_one_worker_after_the_other_fails_costs_no_row() {
    for restarts in ["1", "2"] {
        let failing = JobFixture {
            program_options: &["--tables", "--fail-at", "1234"],
            restart_without_checkpoint: false,
            ..fixture(3)
        };
        let (dir, model) = (failing.path("checkpoints"), failing.path("m.safetensors"));
        let command = failing.command(1).option("shuffle", "none").option("checkpoint-dir", &dir);
        let command = command.option("checkpoint-every", "1000000").option("export", &model);
        let ended = command.option("max-worker-restarts", restarts).run();
        ended.assert_outcome(1, "failed");
        let summary = ended.summary();
        assert_eq!((summary.state_lost, summary.rows_lost), (None, None), "{}", ended.output);
        let newest = summary.checkpoints.as_ref().and_then(|known| known.newest.as_ref());
        assert_eq!(newest.map(|kept| kept.step), Some(1234 / 48), "{}", ended.output);
        let beside = failing.path("m.safetensors.failed");
        assert_eq!(summary.export.as_deref(), beside.to_str(), "{}", ended.output);
        let next = JobFixture { micros_per_record: 20, ..fixture(2) };
        let ended = next.command(1).option("shuffle", "none").option("resume-from", dir).run();
        assert_exact(&ended, &format!("after {restarts} restarts"));
    }
}

#[test]
fn a_group_that_has_lost_all_copies_of_rows_goes_back_to_the_newest_checkpoint() {
    let fixture = fixture(3);
    let dir = fixture.folder.path().join("checkpoints");
    let command = fixture.command(1).option("checkpoint-dir", dir.to_str().unwrap());
    let mut job = command.option("checkpoint-every", "15").start();
    job.wait_for_checkpoints(1);
    job.workers().into_values().take(2).for_each(|pid| send(pid, Signal::KILL));
    let ended = job.wait();
    assert_exact(&ended, "after the loss of both copies");
    let summary = ended.summary();
    let [restored] = &summary.checkpoints.as_ref().unwrap().restored[..] else {
        panic!("{}", ended.output)
    };
    let lost = summary.rows_lost.unwrap();
    // 48 records a step, each of which touches a row.
    let touches = 48 * (lost.at_step - restored.step);
    assert_eq!((lost.count, lost.row_touches), (1, touches), "{}", ended.output);
    assert_eq!(summary.state_lost, None);
    for said in ["ROWS LOST at step", "parts of the model's tables are lost with their workers"] {
        assert!(ended.output.contains(said), "{}", ended.output);
    }
    let again = format!("{touches} row touches are lost, and made again");
    assert!(ended.output.contains(&again), "{}", ended.output);
    assert!(summary.workers.restarts <= 2, "the third worker goes on: {}", ended.output);
}

#[test]
fn a_group_goes_on_with_older_rows_and_the_summary_has_what_is_missing() {
    for has_checkpoint in [true, false] {
        let fixture = fixture(3);
        let dir = fixture.folder.path().join("checkpoints");
        let dir = if has_checkpoint { dir.to_str().unwrap() } else { "none" };
        let command = fixture.command(1).option("checkpoint-dir", dir);
        let command =
            if has_checkpoint { command.option("checkpoint-every", "15") } else { command };
        let mut job = command.option("on-rows-lost", "stale").start();
        job.wait_for_first_steps();
        job.wait_for("a checkpoint", |status| {
            let saved = status.checkpoints.as_ref().map_or(0, |known| known.saved);
            saved > 0 || !has_checkpoint
        });
        job.workers().into_values().take(2).for_each(|pid| send(pid, Signal::KILL));
        let ended = job.wait();
        ended.assert_exact("no step is repeated");
        let summary = ended.summary();
        let lost = summary.rows_lost.unwrap();
        let touches = summary.row_touches.unwrap();
        assert_eq!((touches.expected, touches.repeated), (12_000, 0), "{}", ended.output);
        assert_eq!((lost.count, lost.missing), (1, Some(touches.missing)), "{}", ended.output);
        // 48 records a step, each of which touches a row.
        let range = 1..=48 * lost.at_step;
        assert!(range.contains(&touches.missing), "{}", ended.output);
        assert_eq!(summary.state_lost, None);
        let restored = summary.checkpoints.as_ref().map_or(0, |known| known.restored.len());
        assert_eq!(restored, 0, "{}", ended.output);
        let missing = format!("in which {} touches of rows are missing", touches.missing);
        let how = match has_checkpoint {
            true => "the group goes on, with those of checkpoint step-",
            false => "and they begin anew, as there is no checkpoint",
        };
        let of_loss = format!("; {} row touches are missing", touches.missing);
        for said in [&*missing, how, &of_loss] {
            assert!(ended.output.contains(said), "{}", ended.output);
        }
    }
}

#[test]
fn rows_that_have_changed_since_a_step_are_exported() {
    // Two epochs of 6,000 records with a row each, 48 a step: the last ten have touched 480 rows.
    let fixture = JobFixture { micros_per_record: 20, ..fixture(3) };
    let model = fixture.folder.path().join("m.safetensors");
    let command = fixture.command(1).option("export", model.to_str().unwrap());
    let ended = command.option("export-changes-since", "240").run();
    assert_exact(&ended, "exported");
    let rows = exported_rows(&model, "counts");
    assert_eq!((ended.summary().steps, rows.len()), (250, 480), "{}", ended.output);
    assert!(rows.values().all(|row| row.touches == 2), "{rows:?}");
}

#[test]
fn what_stands_where_rows_are_to_be_exported_is_found_before_training() {
    let fixture = JobFixture { micros_per_record: 20, ..fixture(1) };
    let model = fixture.path("m.safetensors");
    fixture.command(1).option("export", &model).run().assert_exact("a whole model");
    let whole = exported_rows(&model, "counts");
    let (other, taken) = (fixture.path("n.safetensors"), fixture.path("n.safetensors.tables"));
    std::fs::write(&taken, "mine").unwrap();
    let command = |export: &PathBuf| fixture.command(1).option("export", export);
    for (command, said) in [
        (command(&model).option("export-changes-since", "240"), "would leave of the whole model"),
        (command(&other), "n.safetensors.tables, and a file of this name is there"),
    ] {
        let ended = command.run();
        assert_eq!(ended.code, Some(2), "{}", ended.output);
        assert!(ended.output.contains(said), "{}", ended.output);
    }
    assert_eq!(exported_rows(&model, "counts"), whole);
    assert_eq!(std::fs::read_to_string(&taken).unwrap(), "mine");
    // The best model is a whole one, and may take the place of another.
    let command = command(&fixture.path("changes.safetensors")).option("export-best", &model);
    let command = command.option("validation-data", fixture.data()).option("evaluate-every", "20");
    let command = command.option("best-metric", "seen:max").option("export-changes-since", "240");
    command.run().assert_exact("both");
}

#[test]
fn a_worker_whose_rows_take_too_much_memory_ends_the_job_with_a_checkpoint() {
    let program_options = &["--tables", "--wide-rows"];
    let fixture = JobFixture { program_options, ..fixture(3) };
    let dir = fixture.folder.path().join("checkpoints");
    let command = fixture.command(1).option("checkpoint-dir", dir.to_str().unwrap());
    let ended = command.option("table-memory", "1MiB").run();
    ended.assert_outcome(1, "failed");
    for said in
        ["the rows of tables take", "and --table-memory is 1.0 MiB: \"counts\"", " rows in "]
    {
        assert!(ended.output.contains(said), "{}", ended.output);
    }
    let saved = ended.summary().checkpoints.as_ref().unwrap().newest.as_ref().unwrap();
    assert_eq!(saved.step, ended.summary().steps, "{}", ended.output);
    let next = fixture.command(1).option("resume-from", dir.to_str().unwrap()).run();
    assert_exact(&next, "with the memory that it needs");
}

#[test]
fn touches_of_rows_that_are_not_admitted_or_were_evicted_stay_counted() {
    let program_options = &["--tables", "--short-lived"];
    let fixture = JobFixture { program_options, ..fixture(3) };
    let dir = fixture.folder.path().join("checkpoints");
    let model = fixture.folder.path().join("m.safetensors");
    let command = fixture.command(1).option("checkpoint-dir", dir.to_str().unwrap());
    let command = command.option("export", model.to_str().unwrap());
    let mut job = command.option("checkpoint-every", "15").start();
    job.wait_for_checkpoints(3);
    job.signal_workers(Signal::KILL);
    job.wait_for_members(3);
    job.workers().into_values().take(1).for_each(|pid| send(pid, Signal::KILL));
    let ended = job.wait();
    assert_exact(&ended, "after losses");
    let rows = exported_rows(&model, "counts");
    let (touches, others): (u64, u64) =
        (rows.values().map(|row| u64::from(row.touches)).sum(), touches_without_row(&model));
    assert_eq!(touches + others, 12_000);
    assert!(others > 0 && rows.len() > 100, "{others} of {} rows", rows.len());
    assert!(rows.values().all(|row| row.touches == 2), "{rows:?}");
}

#[test]
fn a_checkpoint_whose_rows_are_damaged_is_passed_over_and_told_as_such() {
    let first = fixture(2);
    let dir = first.folder.path().join("checkpoints");
    let command = first.command(1).option("checkpoint-dir", dir.to_str().unwrap());
    let mut job = command.option("checkpoint-every", "15").start();
    job.wait_for_checkpoints(2);
    job.signal(Signal::TERM);
    job.wait().assert_outcome(143, "stopped");
    let folders = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
    let newest = folders.max().unwrap();
    // The last byte of a shard, which is read by those ranks alone that hold it.
    let rows = newest.join("rows-00001-of-00002");
    let mut bytes = std::fs::read(&rows).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&rows, bytes).unwrap();
    let next = JobFixture { micros_per_record: 20, ..fixture(2) };
    let ended = next.command(1).option("resume-from", dir).run();
    assert_exact(&ended, "from the older checkpoint");
    let summary = ended.summary();
    let known = summary.checkpoints.as_ref().unwrap();
    let restored: Vec<u64> = known.restored.iter().map(|restored| restored.step).collect();
    assert!(known.damaged == 1 && restored.len() == 2 && restored[1] < restored[0], "{known:?}");
    assert_eq!((summary.rows_lost, summary.state_lost), (None, None), "{}", ended.output);
    assert!(ended.output.contains("is damaged and passed over"), "{}", ended.output);
}

#[test]
fn without_a_checkpoint_the_beginning_is_one() {
    let job = start(5, (3, 2));
    job.workers().into_values().take(2).for_each(|pid| send(pid, Signal::KILL));
    let ended = job.wait();
    assert_exact(&ended, "from the beginning");
    let lost = ended.summary().rows_lost.unwrap();
    assert_eq!((lost.count, lost.row_touches), (1, 48 * lost.at_step), "{}", ended.output);
    assert_eq!(ended.summary().state_lost.unwrap().count, 1);
}

#[test]
fn rows_are_touched_exactly_once_under_random_kills() {
    for seed in 0..3 {
        let mut job = start(seed, (4, 2));
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..6 {
            // Both copies of a row are lost if two workers are killed before the others have made
            // copies again, which takes a step or two.
            let step = job.status().step;
            job.wait_for("copies", |status| status.step > step + 10);
            std::thread::sleep(Duration::from_millis(rng.random_range(0..100)));
            let (_, pid) = job.any_worker(&mut rng).unwrap();
            send(pid, Signal::KILL);
        }
        let ended = job.wait();
        assert_exact(&ended, &format!("seed {seed}"));
        assert!(ended.lost().len() > 2, "seed {seed}: too fast to be disturbed");
    }
}

#[test]
fn with_three_copies_two_workers_may_be_killed_at_once() {
    let seed = 4;
    let mut job = start(seed, (5, 3));
    for _ in 0..3 {
        let step = job.status().step;
        job.wait_for("copies", |status| {
            let has_all = status.tables.is_some_and(|tables| tables.shards_at_risk == 0);
            status.step > step + 10 && has_all
        });
        job.workers().into_values().take(2).for_each(|pid| send(pid, Signal::KILL));
    }
    let ended = job.wait();
    assert_exact(&ended, &format!("seed {seed}"));
    assert_eq!(ended.summary().rows_lost, None, "{}", ended.output);
    assert!(ended.lost().len() > 3, "too fast to be disturbed");
}

#[test]
fn rows_on_table_servers_survive_when_each_member_is_killed_once() {
    // So slow that the job outlasts the kills.
    let fixture = JobFixture { micros_per_record: 4000, ..fixture(2) };
    let command = fixture.command(1).option("checkpoint-dir", "none");
    let mut job = command.option("table-servers", "2").start().keeping(fixture.folder);
    let status = job.wait_for("rows on table servers alone", |status| {
        let is_at_place = |member: &WorkerStatus| match member.serves_tables {
            true => member.share == Some(0.0) && member.table_bytes.is_some(),
            false => member.share > Some(0.0) && member.table_bytes.is_none(),
        };
        status.members().count() == 4 && status.members().all(is_at_place)
    });
    for member in status.members() {
        job.wait_for("two copies of each row", |status| {
            let has_all = status.tables.is_some_and(|tables| tables.shards_at_risk == 0);
            has_all && status.members().filter(|member| member.serves_tables).count() == 2
        });
        let step = job.status().step;
        job.wait_for("further steps", |status| status.step > step + 3);
        send(member.pid, Signal::KILL);
        job.wait_for_members_without(4, &[member.worker]);
    }
    job.hurry();
    let ended = job.wait();
    assert_exact(&ended, "after each member was killed");
    let summary = ended.summary();
    assert_eq!((summary.rows_lost, summary.state_lost), (None, None), "{}", ended.output);
    assert_eq!((ended.lost().len(), summary.workers.table_servers), (4, 2), "{}", ended.output);
}

#[test]
fn results_have_the_same_bits_with_table_servers() {
    let digest = |workers, servers: &str| {
        let fixture = JobFixture { micros_per_record: 20, ..fixture(workers) };
        let command = fixture.command(1).flag("deterministic");
        let ended = command.option("table-servers", servers).run();
        assert_exact(&ended, &format!("{workers} workers, {servers} table servers"));
        ended.summary().digest.clone()
    };
    let alone = digest(1, "0");
    assert!(alone.is_some());
    assert_eq!([digest(2, "1"), digest(1, "3")], [alone.clone(), alone]);
}

#[test]
fn a_worker_that_is_killed_while_another_one_leaves_loses_no_rows() {
    for seed in 0..3 {
        // Steps of some 50 ms, in one of which both happen.
        let fixture = JobFixture { micros_per_record: 4000, ..fixture(4) };
        let command = fixture.command(seed).option("checkpoint-dir", "none");
        let mut job = command.start().keeping(fixture.folder);
        job.wait_for_first_steps();
        let members = job.members();
        let (leaver, leaver_pid) = members[seed as usize];
        let (killed, killed_pid) = members[seed as usize + 1];
        send(leaver_pid, Signal::TERM);
        std::thread::sleep(Duration::from_millis(10 * seed));
        send(killed_pid, Signal::KILL);
        job.wait_for_members_without(4, &[leaver, killed]);
        job.hurry();
        let ended = job.wait();
        assert_exact(&ended, &format!("seed {seed}"));
        let summary = ended.summary();
        assert_eq!((summary.rows_lost, summary.state_lost), (None, None), "{}", ended.output);
    }
}

#[test]
fn the_workers_that_leave_go_on_if_the_one_that_stays_is_killed() {
    // Steps of some 50 ms.
    let fixture = JobFixture { micros_per_record: 4000, ..fixture(3) };
    let command = fixture.command(1).option("checkpoint-dir", "none");
    let mut job = command.start().keeping(fixture.folder);
    job.wait_for_first_steps();
    let members = job.members();
    let ((_, stays), (_, leaves)) = (members[0], members[1]);
    // It hands nothing over, so the others can't leave yet.
    send(leaves, Signal::STOP);
    job.scale(1);
    send(stays, Signal::KILL);
    send(leaves, Signal::CONT);
    job.hurry();
    let ended = job.wait();
    assert_exact(&ended, "after the loss of the worker that stays");
    let summary = ended.summary();
    assert_eq!((summary.rows_lost, summary.state_lost), (None, None), "{}", ended.output);
}

#[test]
fn an_export_has_the_same_bytes_at_any_number_of_workers() {
    let export = |workers: u32| {
        let fixture = JobFixture { micros_per_record: 20, ..fixture(workers) };
        let model = fixture.folder.path().join("m.safetensors");
        let ended = fixture.command(1).option("export", model.to_str().unwrap()).run();
        assert_exact(&ended, &format!("{workers} workers"));
        let parts = std::fs::read_dir(fixture.folder.path().join("m.safetensors.tables")).unwrap();
        let mut files: Vec<_> = parts.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files.push(model);
        let read = |path: PathBuf| {
            let bytes = std::fs::read(&path).unwrap();
            (path.file_name().unwrap().to_owned(), bytes)
        };
        files.into_iter().map(read).collect::<Vec<_>>()
    };
    let alone = export(1);
    assert!(alone.len() > 1, "there are parts");
    assert!(export(4) == alone, "files differ");
}

#[test]
fn workers_that_leave_at_once_hand_their_rows_over() {
    for size in [2, 1] {
        let mut job = start(u64::from(size), (4, 2));
        job.scale(size);
        job.wait_for_members(size as usize);
        let ended = job.wait();
        assert_exact(&ended, &format!("4 to {size} workers"));
        assert_eq!(ended.lost(), [], "4 to {size} workers");
    }
}
