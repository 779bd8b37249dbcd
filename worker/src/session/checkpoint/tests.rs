use std::num::NonZeroU64;

use super::*;

fn steps(steps: u64) -> CheckpointEvery {
    CheckpointEvery::Steps(NonZeroU64::new(steps).unwrap())
}

const PART: Written = Written { bytes: 8, digest: 3, rows: None };

/// Some ranks of one job that exchange headers. The test decides when their parts are written.
struct Ranks {
    ranks: Vec<(WorkerId, Checkpoints)>,
    step: u64,
    begun: Vec<u64>,
    /// The ranks whose write hangs, and since when.
    hung: Vec<(usize, u64)>,
    stops: bool,
    /// A rank whose state differs.
    differing: Option<usize>,
    /// A rank one of whose shards differs from its copy.
    uneven: Option<usize>,
}

impl Ranks {
    fn new(count: u64, every: CheckpointEvery) -> Self {
        let rank = |id| (WorkerId(id), Checkpoints::new(WorkerId(id), Some(every)));
        Self {
            ranks: (1..=count).map(rank).collect(),
            step: 0,
            begun: Vec::new(),
            hung: Vec::new(),
            stops: false,
            differing: None,
            uneven: None,
        }
    }

    fn members(&self) -> Vec<WorkerId> {
        self.ranks.iter().map(|(id, _)| *id).collect()
    }

    fn headers(&self) -> Vec<CheckpointHeader> {
        self.ranks.iter().map(|(_, c)| c.header(self.step + 1)).collect()
    }

    /// All ranks make a step that takes one second.
    fn step(&mut self) {
        let headers = self.headers();
        let headers: Vec<&CheckpointHeader> = headers.iter().collect();
        self.step += 1;
        let (members, step, now) = (self.members(), self.step, Duration::from_secs(self.step));
        for (_, checkpoints) in &mut self.ranks {
            checkpoints.tick(now);
            checkpoints.handle_headers(&members, &headers);
            if begins(&headers) {
                checkpoints.begin((step, false), Generation(1), &members, now);
            }
        }
        for (rank, (_, checkpoints)) in self.ranks.iter_mut().enumerate() {
            let circumstances = Circumstances { stops: self.stops, ..Circumstances::default() };
            self.hung.extend(checkpoints.poll_hung(now, circumstances).map(|_| (rank, step)));
        }
        self.begun.extend(begins(&headers).then_some(step));
    }

    /// Executes the next task of this rank. Returns whether there was one.
    fn work(&mut self, rank: usize, succeeds: bool) -> bool {
        let digest = u64::from(self.differing == Some(rank));
        let checkpoints = &mut self.ranks[rank].1;
        let task = checkpoints.poll();
        match &task {
            Some(Task::Write { step, .. }) => {
                checkpoints.copied(Duration::ZERO, digest);
                let balance = u64::from(self.uneven == Some(rank));
                let rows = self.uneven.map(|_| WrittenRows { balance, ..WrittenRows::default() });
                checkpoints.wrote(*step, succeeds.then_some(Written { rows, ..PART }).ok_or(()))
            }
            Some(Task::Commit { step, parts }) => {
                assert!(rank == 0 && parts.iter().all(|part| *part == PART));
                checkpoints.committed(*step, succeeds);
            }
            None => {}
        }
        task.is_some()
    }

    /// Steps to `step` and executes all tasks at once.
    fn step_to(&mut self, step: u64) {
        while self.step < step {
            self.step();
            (0..self.ranks.len()).for_each(|rank| while self.work(rank, true) {});
        }
    }

    /// What the group has to do if it ends now.
    fn at_end(&self) -> FinalCheckpoint {
        let headers = self.headers();
        final_checkpoint(&headers.iter().collect::<Vec<_>>(), self.step)
    }

    fn complete(&self) -> Vec<Option<u64>> {
        self.ranks.iter().map(|(_, c)| c.complete).collect()
    }
}

#[test]
fn a_checkpoint_begins_every_n_steps_and_is_complete_with_all_parts_and_the_manifest() {
    let mut ranks = Ranks::new(3, steps(10));
    ranks.step_to(10);
    assert_eq!((&*ranks.begun, ranks.complete()), (&[10][..], vec![None; 3]));
    // One step in which all ranks report their parts as written, one in which the first rank
    // reports the checkpoint as complete.
    ranks.step_to(11);
    assert_eq!(ranks.complete(), [Some(10), None, None]);
    ranks.step_to(12);
    assert_eq!(ranks.complete(), [Some(10); 3]);
    ranks.step_to(40);
    assert_eq!(ranks.begun, [10, 20, 30, 40]);
}

#[test]
fn the_next_checkpoint_begins_only_and_at_once_after_the_one_in_progress() {
    let mut ranks = Ranks::new(2, steps(10));
    ranks.step_to(9);
    while ranks.step < 25 {
        ranks.step();
        ranks.work(0, true);
    }
    assert_eq!(ranks.begun, [10]);
    ranks.step_to(30);
    assert_eq!(ranks.begun, [10, 29]);
}

#[test]
fn the_interval_is_counted_from_the_start_of_the_previous_checkpoint() {
    let mut ranks = Ranks::new(2, CheckpointEvery::Time(Duration::from_secs(10)));
    ranks.step_to(40);
    // A checkpoint that becomes due at the end of a step begins at the end of the next one.
    assert_eq!(ranks.begun, [12, 23, 34]);
}

#[test]
fn the_first_checkpoint_of_a_long_interval_comes_early() {
    let mut ranks = Ranks::new(2, CheckpointEvery::Time(Duration::from_secs(100)));
    ranks.step_to(250);
    assert_eq!(ranks.begun, [32, 133, 234]);
}

#[test]
fn a_requested_checkpoint_begins_at_the_next_step_and_once() {
    let mut ranks = Ranks::new(2, steps(1000));
    ranks.step_to(3);
    ranks.ranks[1].1.request();
    ranks.ranks[0].1.request();
    ranks.step_to(20);
    assert_eq!((&*ranks.begun, ranks.complete()), (&[4][..], vec![Some(4); 2]));
}

#[test]
fn a_lost_member_ends_the_checkpoint_and_the_next_begins_at_once() {
    let mut ranks = Ranks::new(3, steps(10));
    ranks.step_to(9);
    ranks.step();
    assert!(ranks.work(0, true) && ranks.work(2, true));
    ranks.ranks.remove(1);
    let members = ranks.members();
    ranks.ranks.iter_mut().for_each(|(_, c)| c.regrouped(&members));
    ranks.step_to(12);
    assert_eq!(ranks.begun, [10, 11]);
    ranks.step_to(14);
    assert_eq!(ranks.complete(), [Some(11); 2]);
}

#[test]
fn a_worker_that_joins_meanwhile_takes_no_part_and_delays_nothing() {
    let mut ranks = Ranks::new(2, steps(10));
    ranks.step_to(9);
    ranks.step();
    ranks.ranks.push((WorkerId(9), Checkpoints::new(WorkerId(9), Some(steps(10)))));
    let members = ranks.members();
    ranks.ranks.iter_mut().for_each(|(_, c)| c.regrouped(&members));
    ranks.step();
    ranks.step();
    assert_eq!((&*ranks.begun, ranks.complete()), (&[10][..], vec![None; 3]));
    ranks.step_to(16);
    assert_eq!((&*ranks.begun, ranks.complete()), (&[10][..], vec![Some(10); 3]));
    ranks.step_to(20);
    assert_eq!(ranks.begun, [10, 20]);
}

#[test]
fn no_rank_waits_for_one_that_never_began_the_checkpoint() {
    // One rank was one step behind when its links broke, and reached the step by a repair.
    let mut ranks = Ranks::new(2, steps(10));
    ranks.step_to(9);
    ranks.step();
    ranks.ranks[1].1.current = None;
    ranks.ranks[1].1.tasks.clear();
    ranks.ranks[1].1.write = None;
    ranks.step_to(14);
    assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 12][..], vec![Some(12); 2]));
}

#[test]
fn all_ranks_learn_of_a_failed_checkpoint_and_retry_after_an_interval() {
    for failing in [0, 1] {
        let mut ranks = Ranks::new(2, steps(10));
        ranks.step_to(9);
        ranks.step();
        (0..2).for_each(|rank| assert!(ranks.work(rank, rank != failing)));
        ranks.step_to(30);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 20, 30][..], vec![Some(20); 2]));
    }
    // Likewise for the manifest.
    let mut ranks = Ranks::new(1, steps(10));
    ranks.step_to(9);
    ranks.step();
    ranks.work(0, true);
    ranks.step();
    ranks.work(0, false);
    ranks.step_to(21);
    assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 20][..], vec![Some(20)]));
}

/// Makes steps until the write of a rank that began at step 10 turns out to hang. The other ranks
/// write their parts. Returns the step.
fn hang(ranks: &mut Ranks, rank: usize) -> u64 {
    while ranks.hung.is_empty() {
        assert!(ranks.step < 10_000);
        ranks.step();
        for other in 0..ranks.ranks.len() {
            while (other != rank || ranks.step < 10) && ranks.work(other, true) {}
        }
    }
    // All learn of it.
    ranks.step();
    assert_eq!((&*ranks.begun, ranks.complete().iter().flatten().max()), (&[10][..], None));
    assert!(ranks.ranks.iter().all(|(_, c)| c.failed == Some((10, false)) && c.current.is_none()));
    ranks.hung[0].1
}

#[test]
fn a_write_that_hangs_fails_once_and_no_checkpoint_begins_before_it_has_ended() {
    let mut ranks = Ranks::new(3, steps(10));
    assert_eq!(hang(&mut ranks, 1), 10 + WRITE_UNKNOWN.as_secs() + 1);
    (0..5000).for_each(|_| ranks.step());
    assert_eq!((&*ranks.hung, &*ranks.begun), (&[(1, 3611)][..], &[10][..]));
    assert_eq!(ranks.at_end(), FinalCheckpoint::Nothing);
    // The end of the job waits briefly.
    ranks.stops = true;
    ranks.step();
    assert_eq!(ranks.at_end(), FinalCheckpoint::Wait);
    (0..=HUNG_AT_END.as_secs()).for_each(|_| ranks.step());
    assert_eq!(ranks.at_end(), FinalCheckpoint::Nothing);
    ranks.work(1, false);
    let next = ranks.step + 1;
    ranks.step_to(next + 3);
    assert_eq!((&*ranks.begun, ranks.complete()), (&[10, next][..], vec![Some(next); 3]));
}

#[test]
fn a_group_that_stops_waits_for_a_write_and_for_the_next_one_if_that_ends() {
    for (seconds, then) in [(54, FinalCheckpoint::Wait), (57, FinalCheckpoint::Nothing)] {
        let mut ranks = Ranks::new(2, steps(10));
        ranks.step_to(9);
        ranks.step();
        assert!(ranks.work(1, true));
        ranks.stops = true;
        (0..seconds).for_each(|_| ranks.step());
        // Users are told before, and once.
        assert_eq!(ranks.hung, [(0, 11 + TOLD_AT_STOP.as_secs() + 1)]);
        assert_eq!(ranks.at_end(), then);
        if then == FinalCheckpoint::Nothing {
            continue;
        }
        // The store returns.
        assert!(ranks.work(0, true));
        ranks.step();
        assert!(ranks.work(0, true));
        let next = ranks.step + 2;
        (0..40).for_each(|_| ranks.step());
        assert_eq!((ranks.complete(), &*ranks.begun), (vec![Some(10); 2], &[10, next][..]));
        assert_eq!((ranks.at_end(), ranks.hung.len()), (FinalCheckpoint::Wait, 1));
    }
}

#[test]
fn a_group_that_waits_for_its_checkpoint_knows_for_how_long() {
    let mut ranks = Ranks::new(1, steps(10));
    ranks.step_to(9);
    ranks.step();
    let checkpoints = &mut ranks.ranks[0].1;
    let mut at = |s, stops, waits| {
        let circumstances = Circumstances { stops, waits, ..Circumstances::default() };
        checkpoints.poll_hung(Duration::from_secs(s), circumstances);
        checkpoints.waits_for().map(|(waited, limit)| (waited.as_secs(), limit.as_secs()))
    };
    assert_eq!([at(11, false, false), at(12, false, true)], [None, Some((0, 3600))]);
    assert_eq!([at(18, false, true), at(19, true, true)], [Some((6, 3600)), Some((7, 55))]);
    assert_eq!(at(20, true, false), None);
    assert!(ranks.work(0, true) && ranks.ranks[0].1.current.is_some());
}

#[test]
fn a_manifest_that_is_written_after_all_completes_its_checkpoint() {
    let mut ranks = Ranks::new(1, steps(10));
    ranks.step_to(10);
    ranks.step();
    assert_eq!(hang(&mut ranks, 0), 11 + WRITE_UNKNOWN.as_secs() + 1);
    ranks.work(0, true);
    assert_eq!((ranks.complete(), ranks.ranks[0].1.hangs()), (vec![Some(10)], false));
}

#[test]
fn the_limit_of_a_write_is_learned_and_a_stop_does_not_wait_for_it() {
    for (usual, stops, limit) in [(1, false, 900), (60, false, 1200), (60, true, 45)] {
        let mut ranks = Ranks::new(1, steps(1000));
        ranks.step_to(999);
        (0..usual).for_each(|_| ranks.step());
        ranks.step_to(1999);
        assert_eq!(ranks.complete(), [Some(1000)]);
        ranks.step();
        ranks.stops = stops;
        while ranks.hung.is_empty() {
            ranks.step();
        }
        // A stop is known one step later than the write begins.
        assert_eq!(ranks.hung, [(0, 2000 + limit + 1 + u64::from(stops))]);
    }
}

#[test]
fn losing_the_first_rank_loses_the_manifest_and_losing_another_does_not() {
    for (lost, complete) in [(0, 12), (1, 10)] {
        let mut ranks = Ranks::new(3, steps(10));
        ranks.step_to(9);
        ranks.step();
        (0..3).for_each(|rank| assert!(ranks.work(rank, true)));
        // All ranks learn that all parts are written.
        ranks.step();
        ranks.ranks.remove(lost);
        let members = ranks.members();
        ranks.ranks.iter_mut().for_each(|(_, c)| c.regrouped(&members));
        ranks.step_to(14);
        assert_eq!(ranks.complete(), [Some(complete); 2]);
    }
}

#[test]
fn a_step_whose_checkpoint_was_given_up_with_the_state_has_one_when_it_is_made_again() {
    let mut ranks = Ranks::new(3, steps(10));
    ranks.step_to(10);
    // All parts are written. The first rank is lost before its manifest, and the others give up
    // the state.
    ranks.step();
    ranks.ranks.remove(0);
    ranks.ranks.iter_mut().for_each(|(_, checkpoints)| checkpoints.forget());
    ranks.step = 0;
    ranks.step_to(12);
    assert_eq!(ranks.complete(), [Some(10); 2]);
    ranks.step_to(22);
    assert_eq!(ranks.complete(), [Some(20); 2]);
}

#[test]
fn a_manifest_of_a_state_that_was_given_up_completes_no_checkpoint() {
    let mut ranks = Ranks::new(1, steps(10));
    ranks.step_to(10);
    ranks.step();
    let first = &mut ranks.ranks[0].1;
    first.forget();
    first.forget();
    assert!(ranks.work(0, true), "the manifest is written now");
    assert_eq!(ranks.complete(), [None]);
}

#[test]
fn a_checkpoint_abandoned_by_the_first_rank_is_abandoned_by_all() {
    // Only one rank has learned that all parts are written when a member is lost.
    let mut ranks = Ranks::new(4, steps(10));
    ranks.step_to(9);
    ranks.step();
    (0..4).for_each(|rank| assert!(ranks.work(rank, true)));
    let headers: Vec<CheckpointHeader> = ranks.ranks.iter().map(|(_, c)| c.header(11)).collect();
    let members = ranks.members();
    ranks.ranks[3].1.handle_headers(&members, &headers.iter().collect::<Vec<_>>());
    ranks.ranks.remove(1);
    let members = ranks.members();
    ranks.ranks.iter_mut().for_each(|(_, c)| c.regrouped(&members));
    assert!(ranks.ranks[2].1.current.is_some());
    ranks.step_to(15);
    assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 12][..], vec![Some(12); 3]));
}

#[test]
fn a_checkpoint_that_fails_before_the_group_knows_that_it_ends_is_tried_again_once() {
    let mut ranks = Ranks::new(2, steps(10));
    ranks.step_to(9);
    ranks.step();
    for (is_last, then) in [(false, FinalCheckpoint::Begin), (true, FinalCheckpoint::Nothing)] {
        if is_last {
            let members = ranks.members();
            for (_, checkpoints) in &mut ranks.ranks {
                checkpoints.begin((10, true), Generation(1), &members, Duration::ZERO);
            }
        }
        assert!(ranks.work(0, true) && ranks.work(1, false));
        let known = ranks.headers();
        assert_eq!(ranks.at_end(), FinalCheckpoint::Wait);
        let (members, known) = (ranks.members(), known.iter().collect::<Vec<_>>());
        ranks.ranks.iter_mut().for_each(|(_, c)| c.handle_headers(&members, &known));
        assert_eq!(ranks.at_end(), then, "last: {is_last}");
        let known = ranks.headers();
        // The best model does not wait for it again.
        let known: Vec<_> = known.iter().collect();
        assert_eq!(checkpoint_of(&known, (10, false)), FinalCheckpoint::Nothing);
    }
}

#[test]
fn the_final_state_is_written_once_at_the_end() {
    let header = |busy, complete, failed| CheckpointHeader {
        busy,
        complete,
        failed,
        ..CheckpointHeader::default()
    };
    let table = [
        (header(false, None, None), FinalCheckpoint::Begin),
        (header(false, Some(8), Some((7, true))), FinalCheckpoint::Begin),
        (header(true, Some(8), None), FinalCheckpoint::Wait),
        (header(false, Some(9), None), FinalCheckpoint::Nothing),
        // It was begun before the group knew that it ends, so its storage was not waited for.
        (header(false, None, Some((9, false))), FinalCheckpoint::Begin),
        (header(false, None, Some((9, true))), FinalCheckpoint::Nothing),
    ];
    for (other, expected) in table {
        assert_eq!(
            final_checkpoint(&[&CheckpointHeader::default(), &other], 9),
            expected,
            "{other:?}"
        );
    }
    assert_eq!(
        final_checkpoint(&[&CheckpointHeader::default()], 0),
        FinalCheckpoint::Nothing,
        "there is no state to write"
    );
}

#[test]
fn a_resumed_job_counts_its_interval_from_its_checkpoint() {
    let mut ranks = Ranks::new(2, steps(10));
    ranks.step = 25;
    ranks.ranks[0].1.restored(25, true);
    // The first round of a new group is an idle one.
    let headers: Vec<CheckpointHeader> = ranks.ranks.iter().map(|(_, c)| c.header(26)).collect();
    let members = ranks.members();
    ranks
        .ranks
        .iter_mut()
        .for_each(|(_, c)| c.handle_headers(&members, &headers.iter().collect::<Vec<_>>()));
    ranks.step_to(36);
    assert_eq!(ranks.begun, [35]);
}

#[test]
fn a_checkpoint_of_states_that_differ_never_becomes_complete() {
    for differing in 0..3 {
        let mut ranks = Ranks::new(3, steps(10));
        ranks.differing = Some(differing);
        ranks.step_to(30);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10][..], vec![None; 3]), "{differing}");
    }
}

#[test]
fn a_checkpoint_whose_shards_differ_from_their_copies_never_becomes_complete_and_all_learn_of_it() {
    for uneven in 0..3 {
        let mut ranks = Ranks::new(3, steps(10));
        ranks.uneven = Some(uneven);
        ranks.step_to(9);
        assert!(ranks.headers().iter().all(|header| header.differs.is_none()));
        ranks.step_to(30);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10][..], vec![None; 3]), "{uneven}");
        assert!(ranks.headers().iter().all(|header| header.differs == Some(10)));
        // A state that has been given up does not count.
        ranks.ranks[0].1.forget();
        assert_eq!(ranks.headers()[0].differs, None);
    }
}

#[test]
fn no_manifest_is_written_before_all_digests_are_known() {
    let mut ranks = Ranks::new(2, steps(10));
    ranks.step_to(9);
    ranks.step();
    // The parts are written, and a rank has not told the digest of its state.
    for (_, checkpoints) in &mut ranks.ranks {
        assert!(matches!(checkpoints.poll(), Some(Task::Write { step: 10, .. })));
        checkpoints.wrote(10, Ok(PART));
    }
    ranks.ranks[0].1.copied(Duration::ZERO, 0);
    ranks.step();
    ranks.step();
    assert_eq!(ranks.ranks[0].1.poll(), None);
    ranks.ranks[1].1.copied(Duration::ZERO, 0);
    ranks.step();
    assert!(matches!(ranks.ranks[0].1.poll(), Some(Task::Commit { step: 10, .. })));
}
