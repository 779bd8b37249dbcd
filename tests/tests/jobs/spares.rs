//! Spares that are stopped, lost together with members, before the first step or beside a lost
//! master cost no record, with tables and sharded optimizers too; each is counted, and named by an
//! event.

use elasticdl_proto::{Status, WorkerId};
use elasticdl_tests::{JobFixture, Running, send};
use rustix::process::Signal;

use crate::PROGRAMS;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Dense,
    Sharded,
    Tables,
}

const KINDS: [Kind; 3] = [Kind::Dense, Kind::Sharded, Kind::Tables];

/// A job of so many workers, and of two spares.
fn start(kind: Kind, fixture: JobFixture) -> Running {
    let fixture = match kind {
        Kind::Dense => fixture,
        Kind::Sharded => {
            JobFixture { program_options: &["--slots"], parameters: 12_000, ..fixture }
        }
        Kind::Tables => JobFixture { program_options: &["--tables"], ..fixture },
    };
    let command = fixture.command(1).option("spares", "2");
    let command = if kind == Kind::Sharded { command.flag("shard-optimizer") } else { command };
    command.start().keeping(fixture.folder)
}

fn have_caught_up(status: &Status) -> bool {
    status.spares.is_some_and(|spares| spares.caught_up == 2)
}

/// The workers that are no members, with their process ids.
fn spares(status: &Status) -> Vec<(WorkerId, u32)> {
    let spares = status.workers.iter().filter(|worker| worker.rank.is_none());
    spares.map(|worker| (worker.worker, worker.pid)).collect()
}

fn kill(workers: &[(WorkerId, u32)]) -> Vec<WorkerId> {
    workers.iter().for_each(|(_, pid)| send(*pid, Signal::KILL));
    workers.iter().map(|(id, _)| *id).collect()
}

/// Ends the job; each record must be counted once. Returns how often a spare was promoted.
fn assert_exact(mut job: Running, context: &str) -> u64 {
    job.wait_for("spares that have caught up", have_caught_up);
    job.hurry();
    let ended = job.wait();
    ended.assert_exact(context);
    let summary = ended.summary();
    assert_eq!(
        (summary.state_lost, summary.rows_lost),
        (None, None),
        "{context}: {}",
        ended.output
    );
    let promoted = summary.workers.spares.unwrap().promoted;
    let named: usize = summary.memberships.iter().map(|change| change.promoted.len()).sum();
    assert_eq!(named as u64, promoted, "{context}");
    promoted
}

#[test]
fn a_spare_that_is_lost_with_a_member_leaves_the_place_to_the_other_one() {
    for kind in KINDS {
        let mut job = start(kind, JobFixture::new(PROGRAMS, 3).lasting());
        for _ in 0..2 {
            job.wait_for_members(3);
            let status = job.wait_for("spares that have caught up", have_caught_up);
            job.wait_for_next_step();
            let gone = kill(&[spares(&status)[0], job.members()[1]]);
            job.wait_for_members_without(3, &gone);
        }
        let promoted = assert_exact(job, &format!("{kind:?}"));
        assert!(promoted > 0, "{kind:?}");
    }
}

#[test]
fn stopped_spares_are_replaced_and_the_place_of_a_lost_member_is_filled() {
    let fixture = JobFixture {
        worker_timeout: Some("2s"),
        // A minute, unless it is hurried.
        micros_per_record: 16_000,
        ..JobFixture::new(PROGRAMS, 3)
    };
    let mut job = start(Kind::Dense, fixture);
    let status = job.wait_for("spares that have caught up", have_caught_up);
    let stopped = spares(&status);
    stopped.iter().for_each(|(_, pid)| send(*pid, Signal::STOP));
    let lost = kill(&job.members()[1..2]);
    let gone: Vec<WorkerId> = stopped.iter().map(|(id, _)| *id).chain(lost).collect();
    job.wait_for_members_without(3, &gone);
    assert_exact(job, "stopped spares");
}

#[test]
fn spares_of_a_group_that_is_lost_before_its_first_step_follow_the_next_one() {
    for kind in KINDS {
        // Five seconds for a step, so that a slow machine kills the worker before its first one.
        let slow = JobFixture { micros_per_record: 100_000, ..JobFixture::new(PROGRAMS, 1) };
        let mut job = start(kind, slow);
        job.wait_for("spares that fetch the state", |status| {
            let states = status.workers.iter().map(|worker| &*worker.state);
            let waits = states.filter(|state| ["fetching", "spare"].contains(state)).count();
            status.members().count() == 1 && waits == 2
        });
        assert_eq!(job.status().step, 0, "{kind:?}");
        kill(&job.members());
        assert_exact(job, &format!("{kind:?}"));
    }
}

#[test]
fn a_lone_worker_that_is_given_up_while_it_leaves_takes_no_state_with_it() {
    let fixture = JobFixture {
        // It leaves within a step, of a second.
        micros_per_record: 20_000,
        out_of_reach: true,
        ..JobFixture::new(PROGRAMS, 1)
    };
    let mut job = start(Kind::Dense, fixture);
    job.wait_for("spares that have caught up", |status| have_caught_up(status) && status.step > 1);
    let (leaver, pid) = job.members()[0];
    let its_stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let starter = its_stat.rsplit(')').next().unwrap().split_whitespace().nth(1).unwrap();
    job.wait_for_next_step();
    send(pid, Signal::TERM);
    job.wait_for("a spare beside it", |status| status.members().count() == 2);
    // For the master it is gone, like a pod that is deleted by force.
    send(starter.parse().unwrap(), Signal::KILL);
    job.wait_for_members_without(1, &[leaver]);
    send(pid, Signal::KILL);
    assert_eq!(assert_exact(job, "a leaver that is given up"), 1);
}

#[test]
fn spares_take_places_after_a_master_was_lost() {
    for kind in KINDS {
        let mut job = start(kind, JobFixture::new(PROGRAMS, 3).lasting());
        job.wait_for("spares that have caught up", have_caught_up);
        job.kill_master();
        job.resume();
        job.wait_for_return_of(5);
        job.wait_for("spares that have caught up", have_caught_up);
        let gone = kill(&job.members()[1..2]);
        job.wait_for_members_without(3, &gone);
        assert_eq!(assert_exact(job, &format!("{kind:?}")), 1, "{kind:?}");
    }
}
