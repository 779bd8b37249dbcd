//! Losses during a regroup, of the first rank, of a joining worker and its donor, of all but one
//! worker cost no record; spares take the places of lost workers at once.

use std::collections::BTreeSet;
use std::time::Duration;

use elasticdl_proto::{MembershipChange, Status, WorkerId};
use elasticdl_tests::{JobFixture, send};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::PROGRAMS;

#[test]
fn a_second_loss_while_the_group_repairs_the_first_one_costs_no_record() {
    let mut overlaps = 0;
    for seed in 0..3 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let fixture = JobFixture::new(PROGRAMS, 5).lasting();
        let mut job = if seed % 2 == 0 { fixture.large() } else { fixture }.start(seed);
        let mut delays = Vec::new();
        for _ in 0..2 {
            let members = job.members();
            let first = rng.random_range(0..members.len());
            // The second one may be a neighbour of the first.
            let second = (first + rng.random_range(1..members.len())) % members.len();
            let delay = Duration::from_micros(rng.random_range(0..20_000));
            delays.push(delay);
            send(members[first].1, Signal::KILL);
            std::thread::sleep(delay);
            send(members[second].1, Signal::KILL);
            let gone = [members[first].0, members[second].0];
            job.wait_for_members_without(5, &gone);
        }
        job.hurry();
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}, second kills after {delays:?}"));
        overlaps += overlapping_losses(ended.memberships());
    }
    assert!(overlaps > 0, "no second loss hit a group that was repairing the first one");
}

/// Number of losses that hit a group before it had made a step without an earlier lost worker: both
/// are lost in one generation, or the first generation was replaced before it committed a step.
fn overlapping_losses(memberships: &[MembershipChange]) -> usize {
    let at_once = memberships.iter().filter(|m| m.lost.len() > 1).count();
    let in_a_row = memberships.windows(2).filter(|pair| {
        !pair[0].lost.is_empty() && pair[0].gap_ms.is_none() && !pair[1].lost.is_empty()
    });
    at_once + in_a_row.count()
}

#[test]
fn the_rank_that_reports_for_the_group_may_die_repeatedly() {
    let mut job = JobFixture::new(PROGRAMS, 3).start(1);
    let mut kills = 0;
    while let Some(&(first, pid)) = job.members().first() {
        send(pid, Signal::KILL);
        kills += 1;
        if kills == 4 {
            break;
        }
        job.wait_for("another speaker", |status| {
            status.workers.iter().any(|w| w.rank == Some(0) && w.worker != first)
        });
    }
    let ended = job.wait();
    ended.assert_exact(&format!("{kills} speakers killed"));
    assert_eq!(kills, 4);
}

#[test]
fn a_joiner_that_dies_before_it_is_a_member_does_not_delay_the_group() {
    let mut never_joined = 0;
    for seed in 0..2 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut job = JobFixture::new(PROGRAMS, 2).large().start(seed);
        job.scale(3);
        let mut killed = Vec::new();
        for _ in 0..4 {
            // The newest worker: it is fetching the state, or has just joined.
            let known = job.workers().keys().copied().max();
            let status = job.wait_for("a joiner", |status| {
                newest_of(status) >= known && status.workers.len() >= 3
            });
            std::thread::sleep(Duration::from_micros(rng.random_range(0..40_000)));
            let newest = newest_of(&status).unwrap();
            if let Some(pid) = job.workers().get(&newest) {
                send(*pid, Signal::KILL);
                killed.push(newest);
            }
            job.wait_for("its end", |status| status.workers.iter().all(|w| w.worker != newest));
        }
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}, joiners {killed:?} killed"));
        let has_joined =
            |id: &&WorkerId| ended.memberships().iter().any(|m| m.joined.contains(*id));
        never_joined += killed.iter().filter(|id| !has_joined(id)).count();
    }
    assert!(never_joined > 0, "every killed worker had become a member");
}

fn newest_of(status: &Status) -> Option<WorkerId> {
    status.workers.iter().map(|worker| worker.worker).max()
}

#[test]
fn the_donor_of_a_joiners_state_may_die() {
    let mut interrupted = 0;
    for seed in 0..2 {
        // A state whose transfer takes much longer than the status does.
        let fixture = JobFixture {
            parameters: 8 << 20,
            global_batch_size: 600,
            ..JobFixture::new(PROGRAMS, 3)
        };
        let mut job = fixture.start(seed);
        let donors = job.members();
        job.scale(4);
        let status =
            job.wait_for("a joiner that fetches the state", |status| fetching(status).is_some());
        let joiner = fetching(&status).unwrap();
        // The lowest rank is the last choice as a donor, so one of these is the donor.
        donors[1..].iter().for_each(|(_, pid)| send(*pid, Signal::KILL));
        // A joiner that still fetches now has lost its donor amid the transfer.
        interrupted += u32::from(fetching(&job.status()) == Some(joiner));
        job.wait_for_members(4);
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}, the donors of worker {joiner} killed"));
    }
    assert!(interrupted > 0, "no donor died before it had sent the state");
}

/// The first worker that fetches the state.
fn fetching(status: &Status) -> Option<WorkerId> {
    status.workers.iter().find(|w| w.state == "fetching").map(|w| w.worker)
}

#[test]
fn the_last_member_of_a_group_continues_alone_and_others_join_it() {
    for survivor in [0, 2, 3] {
        let mut job = JobFixture::new(PROGRAMS, 4).lasting().start(survivor);
        let members = job.members();
        let (kept, _) = members[survivor as usize];
        for (_, pid) in members.iter().filter(|(id, _)| *id != kept) {
            send(*pid, Signal::KILL);
        }
        job.wait_for("four members again", |status| {
            status.members().count() == 4
                && status.members().all(|m| m.worker == kept || m.worker.0 > 4)
        });
        job.hurry();
        let ended = job.wait();
        ended.assert_exact(&format!("all but worker {kept} killed"));
        let lost: BTreeSet<WorkerId> = ended.lost().into_iter().collect();
        let killed = members.iter().map(|(id, _)| *id).filter(|id| *id != kept);
        assert_eq!(lost, killed.collect());
        assert_steps_never_decrease(ended.memberships());
    }
}

/// Asserts that each generation begins at the step of the previous one, or later.
fn assert_steps_never_decrease(memberships: &[MembershipChange]) {
    let steps: Vec<u64> = memberships.iter().map(|m| m.at_step).collect();
    assert!(steps.is_sorted(), "{steps:?}");
}

#[test]
fn records_of_workers_that_join_during_kills_are_counted_exactly_once() {
    for seed in 0..2 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut job = JobFixture::new(PROGRAMS, 2).large().lasting().start(seed);
        for size in 3..=5 {
            job.scale(size);
            std::thread::sleep(Duration::from_millis(rng.random_range(0..60)));
            if let Some((_, pid)) = job.any_worker(&mut rng) {
                send(pid, Signal::KILL);
            }
            job.wait_for_members(size as usize);
        }
        job.hurry();
        job.wait().assert_exact(&format!("seed {seed}, joins under fire"));
    }
}

#[test]
fn spares_take_the_places_of_lost_workers_in_the_same_generation() {
    let fixture = JobFixture::new(PROGRAMS, 3).lasting();
    let mut job = fixture.command(0).option("spares", "2").start();
    let two_spares = |status: &Status| {
        let states = status.workers.iter().map(|worker| &*worker.state);
        states.clone().filter(|state| *state == "spare").count() == 2
            && states.filter(|state| *state == "training").count() == 3
    };
    for kill in [1..2, 1..3] {
        let status = job.wait_for("two spares", two_spares);
        let members = job.members();
        members[kill.clone()].iter().for_each(|(_, pid)| send(*pid, Signal::KILL));
        let gone: Vec<_> = members[kill].iter().map(|(id, _)| *id).collect();
        job.wait_for_members_without(3, &gone);
        assert_eq!(status.workers_desired, 3);
    }
    let status = job.wait_for("two spares", two_spares);
    let spare = status.workers.iter().find(|worker| worker.state == "spare").unwrap();
    let before = status.generation;
    send(spare.pid, Signal::KILL);
    job.wait_for("its replacement", |status| {
        two_spares(status) && status.workers.iter().all(|worker| worker.worker != spare.worker)
    });
    assert_eq!(job.status().generation, before, "the loss of a spare changes no group");
    fixture.hurry();
    let ended = job.wait();
    let records = fixture.records;
    ended.assert_exactly_once("with spares", records, fixture.epochs);
    let sizes: Vec<u32> = ended.memberships().iter().map(|m| m.world_size).collect();
    assert!(sizes.iter().all(|&size| size == 3), "{sizes:?}");
}

#[test]
fn a_group_that_is_lost_as_a_whole_goes_on_with_the_state_of_its_spares() {
    let fixture = JobFixture::new(PROGRAMS, 1).lasting();
    let mut job = fixture.command(0).option("spares", "2").start();
    for _ in 0..3 {
        // The first ones were there before the group, and later ones have lost their donors.
        job.wait_for("two spares", |status| {
            let spares = status.workers.iter().filter(|worker| worker.state == "spare").count();
            spares == 2 && status.members().count() == 1
        });
        job.wait_for_next_step();
        send(job.members()[0].1, Signal::KILL);
    }
    fixture.hurry();
    let ended = job.wait();
    assert_eq!(ended.summary().state_lost, None, "{}", ended.output);
    ended.assert_exactly_once("with spares", fixture.records, fixture.epochs);
}
