//! Jobs whose speed depends on their workers in given ways.

use elasticdl_proto::StepTimes;
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::job::testing::spec;

/// A job whose speed depends on its workers, and on the time.
struct Scenario {
    policy: Autoscale,
    now: Time,
    group: GroupSize,
    /// Workers for which there is capacity.
    capacity: u32,
    /// Records per second of so many workers at a time.
    rate: fn(u32, Time) -> f64,
    /// By how much the speed of a report differs from it at most.
    noise: f64,
    rng: ChaCha8Rng,
    /// The numbers of workers since the beginning, and when they were wanted.
    wanted: Vec<(Time, u32)>,
    found: Vec<String>,
}

impl Scenario {
    /// A job of 1 to 16 workers that begins with so many.
    fn new(workers: u32, rate: fn(u32, Time) -> f64) -> Self {
        let spec = JobSpec { num_workers: workers, max_workers: 16, ..spec() };
        let generation = Generation(1);
        Self {
            policy: Autoscale::new(&spec),
            now: Time::default(),
            group: GroupSize {
                generation,
                members: workers,
                wanted: workers,
                placed: workers,
                is_full: false,
            },
            capacity: u32::MAX,
            rate,
            noise: 0.0,
            rng: ChaCha8Rng::seed_from_u64(0),
            wanted: vec![(Time::default(), workers)],
            found: Vec::new(),
        }
    }

    /// Runs the job for so long. Its steps take half a second, and a change of its group 5 s.
    fn run(&mut self, span: Duration) {
        let end = self.now + span;
        let mut joins_at = Time::default();
        while self.now < end {
            self.now = self.now + STEP;
            let group = &mut self.group;
            group.placed = group.wanted.min(self.capacity);
            group.is_full = group.wanted > self.capacity;
            let is_due = self.now >= joins_at && group.members != group.placed;
            if is_due && joins_at == Time::default() {
                joins_at = self.now + Duration::from_secs(5);
            } else if is_due {
                (group.members, joins_at) = (group.placed, Time::default());
                group.generation = group.generation.next();
            }
            let noise = self.rng.random_range(-self.noise..=self.noise);
            let rate = (self.rate)(self.group.members, self.now) * (1.0 + noise);
            let times = StepTimes { steps: 1, step_us: 500_000, reduce_us: 0 };
            let records = (rate * STEP.as_secs_f64()).round() as u64;
            let report = Committed { records, times, ..Committed::default() };
            if let Some(decision) = self.policy.observe(self.now, self.group, 1, &report) {
                self.found.push(decision.why);
                if decision.wanted != self.group.wanted {
                    self.wanted.push((self.now, decision.wanted));
                    self.group.wanted = decision.wanted;
                }
            }
        }
    }

    fn numbers(&self) -> Vec<u32> {
        self.wanted.iter().map(|(_, wanted)| *wanted).collect()
    }

    /// Changes of the number of workers in each hour.
    fn changes_per_hour(&self) -> Vec<usize> {
        let mut changes = vec![0; self.now.0.as_secs().div_ceil(3600) as usize];
        for (at, _) in &self.wanted[1..] {
            changes[(at.0.as_secs() / 3600) as usize] += 1;
        }
        changes
    }
}

const STEP: Duration = Duration::from_millis(500);
const HOUR: Duration = Duration::from_secs(3600);

fn linear(workers: u32, _: Time) -> f64 {
    1000.0 * f64::from(workers)
}

fn saturates_at_5(workers: u32, _: Time) -> f64 {
    1000.0 * f64::from(workers.min(5))
}

#[test]
fn a_job_whose_workers_all_pay_takes_as_many_as_it_may() {
    let mut job = Scenario::new(2, linear);
    job.run(HOUR / 6);
    assert_eq!(job.numbers(), [2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16]);
    assert_eq!(job.found[0], "2 workers make 2000 records/s; trying 3");
    let last = "16 workers make 16000 records/s, 7 % more than 15, so they pay; 16 stay, to be \
                measured again in 10 min";
    assert_eq!(job.found.last().unwrap(), last);
    // They were measured: none is given up to learn that.
    job.run(24 * HOUR);
    assert_eq!(job.numbers().len(), 11);
}

#[test]
fn workers_that_don_t_pay_are_given_back() {
    let mut job = Scenario::new(2, saturates_at_5);
    job.run(HOUR / 6);
    assert_eq!(job.numbers(), [2, 3, 4, 5, 6, 5]);
    let last = "6 workers make 5000 records/s, 0 % more than 5, so the further ones don't pay; \
                5 stay, to be measured again in 10 min";
    assert_eq!(job.found.last().unwrap(), last);
}

#[test]
fn a_job_that_begins_with_too_many_workers_gives_back_those_that_don_t_pay() {
    let mut job = Scenario::new(12, saturates_at_5);
    job.run(HOUR / 6);
    assert_eq!(job.numbers(), [12, 15, 9, 7, 6, 5, 4, 5]);
    let last = "4 workers make 4000 records/s, 20 % less than 5, so all 5 pay; 5 stay, to be \
                measured again in 10 min";
    assert_eq!(job.found.last().unwrap(), last);
    // With everything as before, only a further worker is tried from time to time.
    let changes = job.numbers().len();
    job.run(24 * HOUR);
    assert!(job.numbers()[changes..].chunks(2).all(|pair| pair == [6, 5]));
    let per_hour = job.changes_per_hour();
    assert_eq!((per_hour[0], per_hour[4..].iter().max()), (11, Some(&2)), "{per_hour:?}");
}

#[test]
fn a_job_that_becomes_slower_gives_workers_back_and_takes_them_again() {
    // For three hours in between, no more than 3 workers get data.
    let rate = |workers: u32, now: Time| {
        let most = if (4 * HOUR..7 * HOUR).contains(&now.0) { 3 } else { 8 };
        1000.0 * f64::from(workers.min(most))
    };
    let mut job = Scenario::new(2, rate);
    for (until, expected) in [(4, 8), (7, 3), (10, 8)] {
        job.run(until * HOUR - job.now.0);
        assert_eq!(job.group.wanted, expected, "{until}: {:?}", job.wanted);
    }
}

#[test]
fn noise_hides_neither_a_worker_that_pays_nor_one_that_doesn_t() {
    for seed in 0..200 {
        let mut job = Scenario::new(2, saturates_at_5);
        (job.noise, job.rng) = (0.1, ChaCha8Rng::seed_from_u64(seed));
        job.run(HOUR / 6);
        assert_eq!(job.group.wanted, 5, "seed {seed}: {:?}", job.found);
    }
}

#[test]
fn a_disturbance_of_two_seconds_changes_nothing() {
    for second in 0..100 {
        let mut job = Scenario::new(2, saturates_at_5);
        job.run(Duration::from_secs(second));
        let before = job.rate;
        job.rate = |_, _| 100.0;
        job.run(Duration::from_secs(2));
        job.rate = before;
        job.run(HOUR / 12);
        assert_eq!(job.group.wanted, 5, "second {second}: {:?}", job.found);
    }
}

#[test]
fn a_load_that_comes_and_goes_does_not_move_workers_all_the_time() {
    for minutes in [1, 3, 7, 12, 31, 60] {
        let mut job = Scenario::new(4, |_, _| 0.0);
        for i in 0..48 * 60 / minutes {
            job.rate = if i % 2 == 0 { linear } else { |_, _| 3000.0 };
            job.run(Duration::from_secs(60 * minutes));
        }
        let per_hour = job.changes_per_hour();
        let total: usize = per_hour[8..].iter().sum();
        let most = per_hour.iter().max().unwrap();
        assert!(*most <= 40 && total <= 40 * 6, "{minutes} min: {per_hour:?}");
    }
}

#[test]
fn without_capacity_a_trial_ends_where_it_began_and_comes_again() {
    let mut job = Scenario::new(2, linear);
    job.capacity = 3;
    job.run(HOUR);
    let mut expected = vec![2, 3];
    expected.extend([4, 3].repeat(6));
    assert_eq!(job.numbers(), expected);
    let last = "there is no capacity for 4 workers; 3 stay, to be measured again in 10 min";
    assert_eq!(job.found.last().unwrap(), last);
    job.capacity = u32::MAX;
    job.run(HOUR / 3);
    assert_eq!(job.group.wanted, 16);
}

#[test]
fn as_many_workers_are_tried_as_there_is_capacity_for() {
    let mut job = Scenario::new(12, linear);
    job.capacity = 14;
    job.run(Duration::from_secs(60));
    assert_eq!(job.numbers(), [12, 15, 14, 16, 14]);
    assert!(job.found[1].starts_with("there is no capacity for 15 workers; trying 14"));
}

#[test]
fn workers_that_don_t_join_end_a_trial() {
    let mut job = Scenario::new(2, linear);
    job.run(Duration::from_secs(10));
    assert_eq!(job.numbers(), [2, 3]);
    job.group.members = 2;
    let observe = |job: &mut Scenario, second| {
        let now = Time(Duration::from_secs(second));
        job.policy.observe(now, job.group, 1, &Committed::default())
    };
    assert_eq!(observe(&mut job, 128), None);
    let why = "3 workers have not joined; 2 stay, to be measured again in 10 min".into();
    assert_eq!(observe(&mut job, 129), Some(Decision { wanted: 2, why }));
}

#[test]
fn the_user_s_limit_holds_and_the_least_number_is_kept() {
    let mut job = Scenario::new(4, linear);
    job.run(Duration::from_secs(10));
    job.policy.limit(6);
    job.group.wanted = 6;
    job.run(2 * HOUR);
    assert_eq!(job.numbers(), [4, 5, 5, 6], "{:?}", job.found);

    let mut job = Scenario::new(4, |_, _| 3000.0);
    job.policy.min = 3;
    job.run(2 * HOUR);
    let numbers = job.numbers();
    assert!(numbers.iter().all(|&n| n >= 3) && numbers.last() == Some(&3), "{numbers:?}");
}

#[test]
fn pods_are_added_and_removed_as_a_whole() {
    let mut job = Scenario::new(8, linear);
    job.policy.per_pod = 4;
    job.run(HOUR / 6);
    assert_eq!(job.numbers(), [8, 12, 16]);
}
