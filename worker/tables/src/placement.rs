//! Which workers hold which shard.
//!
//! The rows of a job are divided into shards, by hash. Each shard has copies on several workers;
//! the first of them owns it and answers for it. Which workers *should* hold a shard is a function
//! of the group alone (rendezvous hashing), so a change of the group moves as few shards as
//! possible. Which workers *do* hold it is state, and changes when a step is committed:
//!
//! ```text
//!  commit s            boundary              commit s + 1
//!  placement P(s) ──▶ copies(P(s), group) ──▶ P(s + 1) = P(s), of the group's workers, and copies
//!                     sent with the rows of s + 1
//! ```
//!
//! **Invariant:** all functions depend on their arguments alone, so all ranks come to the same
//! result. **Invariant:** a worker that is named as the holder of a shard has all of its rows as of
//! the placement's step.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A worker of the group, for placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The worker's number in the job.
    pub worker: u64,
    /// What fails together: workers with the same number are on one host.
    pub host: u64,
    /// Whether the worker is about to leave the group, and gives its shards away.
    pub leaves: bool,
    /// Whether it is a table server: others hold shards only if there are fewer of these than
    /// copies.
    pub serves: bool,
}

impl Member {
    /// A worker that stays, and is no table server.
    pub fn new(worker: u64, host: u64) -> Self {
        Self { worker, host, leaves: false, serves: false }
    }
}

/// Workers that hold the rows of each shard as of one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Number of copies that each shard should have, at least 1.
    copies: u32,
    /// Number of shards that a worker sends, and receives, between two steps.
    copied_per_step: u32,
    /// Workers with a copy, by shard; the first one owns it. Most steps change nothing here.
    #[serde(with = "shared")]
    holders: Arc<Vec<Vec<u64>>>,
}

/// What is shared is written like any other value.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(
        holders: &Arc<Vec<Vec<u64>>>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        holders.as_ref().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Arc<Vec<Vec<u64>>>, D::Error> {
        Vec::deserialize(from).map(Arc::new)
    }
}

/// A copy of a shard to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardCopy {
    /// The shard.
    pub shard: u32,
    /// The worker that owns it.
    pub from: u64,
    /// The worker that will hold it, too.
    pub to: u64,
}

impl Placement {
    /// Placement of empty shards: nothing has to be copied.
    pub fn new(shards: u32, copies: u32, members: &[Member]) -> Self {
        let holders: Vec<_> = (0..shards).map(|shard| wanted(shard, copies, members)).collect();
        Self { copies, copied_per_step: 1, holders: Arc::new(holders) }
    }

    /// Sets how many shards a worker sends, and receives, between two steps; at least 1.
    pub fn copied_per_step(self, shards: u64) -> Self {
        let most = self.holders.len() as u64;
        Self { copied_per_step: shards.clamp(1, most.max(1)) as u32, ..self }
    }

    /// Number of shards.
    pub fn shards(&self) -> u32 {
        self.holders.len() as u32
    }

    /// Workers with a copy of `shard`; the first one owns it.
    pub fn holders(&self, shard: u32) -> &[u64] {
        &self.holders[shard as usize]
    }

    /// The shards that `worker` holds.
    pub fn held_by(&self, worker: u64) -> impl Iterator<Item = u32> {
        let holders = (0..).zip(self.holders.iter());
        holders.filter(move |(_, h)| h.contains(&worker)).map(|(shard, _)| shard)
    }

    /// Shards with fewer copies than this group could hold.
    pub fn at_risk(&self, members: &[Member]) -> usize {
        let copies = (self.copies as usize).min(members.len());
        self.holders.iter().filter(|holders| holders.len() < copies).count()
    }

    /// What is left of the placement on these workers.
    pub fn within(&self, holds: impl Fn(u64) -> bool) -> Self {
        let left = |holders: &Vec<u64>| holders.iter().copied().filter(|&w| holds(w)).collect();
        Self { holders: Arc::new(self.holders.iter().map(left).collect()), ..*self }
    }

    /// The placement in which the holders of `other` hold their shards, too.
    pub fn with_holders_of(&self, other: &Self) -> Self {
        let mut holders = self.holders.to_vec();
        for (holders, others) in holders.iter_mut().zip(other.holders.iter()) {
            let more: Vec<u64> = others.iter().filter(|w| !holders.contains(w)).copied().collect();
            holders.extend(more);
        }
        Self { holders: Arc::new(holders), ..*self }
    }

    /// The placement in which these members hold the shards without any copy, too.
    pub fn filled(&self, members: &[Member]) -> Self {
        let filled = |(shard, holders): (u32, &Vec<u64>)| match holders.is_empty() {
            true => wanted(shard, self.copies, members),
            false => holders.clone(),
        };
        Self { holders: Arc::new((0..).zip(self.holders.iter()).map(filled).collect()), ..*self }
    }

    /// Whether the same workers hold the same shards.
    pub fn is_as(&self, other: &Self) -> bool {
        self.holders == other.holders
    }

    /// Shards without any copy.
    pub fn lost(&self) -> impl Iterator<Item = u32> {
        let holders = (0..).zip(self.holders.iter());
        holders.filter(|(_, holders)| holders.is_empty()).map(|(shard, _)| shard)
    }

    /// The copies to be made next, so that these members hold what they should: shards with the
    /// fewest copies first, and a limited number from each worker and to each worker.
    pub fn copies(&self, members: &[Member]) -> Vec<ShardCopy> {
        let limit = self.copied_per_step as usize;
        let mut missing = Vec::new();
        for (shard, holders) in (0..).zip(self.holders.iter()) {
            let Some(&from) = holders.first() else { continue };
            let absent = wanted(shard, self.copies, members);
            let absent = absent.into_iter().filter(|to| !holders.contains(to));
            missing.extend(absent.map(|to| (holders.len(), ShardCopy { shard, from, to })));
        }
        missing.sort_by_key(|&(copies, copy)| (copies, copy.shard));
        let mut chosen: Vec<ShardCopy> = Vec::new();
        for (_, copy) in missing {
            let busy = chosen.iter().filter(|c| c.from == copy.from).count();
            let receiving = chosen.iter().filter(|c| c.to == copy.to).count();
            if busy < limit && receiving < limit {
                chosen.push(copy);
            }
        }
        chosen
    }

    /// The placement after a step before which `copies` were made. Surplus copies are given up once
    /// all the workers hold a shard that should.
    pub fn after(&self, copies: &[ShardCopy], members: &[Member]) -> Self {
        let mut next = self.holders.to_vec();
        for copy in copies {
            next[copy.shard as usize].push(copy.to);
        }
        for (shard, holders) in (0..).zip(&mut next) {
            let wanted = wanted(shard, self.copies, members);
            // The workers that should hold the shard come first, in their order; the others keep it
            // until there are enough copies.
            let place = |worker: &u64| wanted.iter().position(|other| other == worker);
            holders.sort_by_key(|worker| place(worker).unwrap_or(wanted.len()));
            if wanted.iter().all(|worker| holders.contains(worker)) {
                holders.truncate(self.copies as usize);
            }
        }
        Self { holders: Arc::new(next), ..*self }
    }
}

/// The shard of a row. `table`: the table's index in the job.
pub fn shard_of(table: u32, id: u64, shards: u32) -> u32 {
    let hash = xxh3_64_with_seed(&id.to_le_bytes(), SHARD_SEED ^ u64::from(table));
    ((u128::from(hash) * u128::from(shards)) >> 64) as u32
}

/// The workers that should hold `shard`, the owner first: table servers, then others, those with
/// the highest hashes, each on another host as long as there are any. Thaler, Ravishankar, IEEE/ACM
/// Trans. Netw. 6 (1998).
fn wanted(shard: u32, copies: u32, members: &[Member]) -> Vec<u64> {
    let score = |member: &Member| {
        xxh3_64_with_seed(&member.worker.to_le_bytes(), PLACEMENT_SEED ^ u64::from(shard))
    };
    let any_stays = members.iter().any(|member| !member.leaves);
    let stays = |member: &&Member| !any_stays || !member.leaves;
    let mut left: Vec<&Member> = members.iter().filter(stays).collect();
    let rank = |member: &&Member| (member.serves, score(member), member.worker);
    left.sort_by_key(|member| std::cmp::Reverse(rank(member)));
    let (mut workers, mut hosts) = (Vec::new(), Vec::new());
    while workers.len() < copies as usize && !left.is_empty() {
        let mut alike = left.iter().take_while(|member| member.serves == left[0].serves);
        let other = alike.position(|member| !hosts.contains(&member.host));
        let member = left.remove(other.unwrap_or(0));
        workers.push(member.worker);
        hosts.push(member.host);
    }
    workers
}

/// Keys of the hashes.
const SHARD_SEED: u64 = 0x7461_626c_6573_0001;
const PLACEMENT_SEED: u64 = 0x7461_626c_6573_0002;

#[cfg(test)]
mod tests {
    use super::*;

    fn members(workers: impl IntoIterator<Item = u64>) -> Vec<Member> {
        workers.into_iter().map(|worker| Member::new(worker, worker)).collect()
    }

    /// Moves everything to where these members should hold it; returns the number of steps and of
    /// copies.
    fn settle(placement: &mut Placement, members: &[Member], limit: u64) -> (usize, usize) {
        *placement = placement.clone().copied_per_step(limit);
        let (mut steps, mut copied) = (0, 0);
        loop {
            let copies = placement.copies(members);
            assert!(copies.iter().all(|copy| placement.holders(copy.shard)[0] == copy.from));
            *placement = placement.after(&copies, members);
            if copies.is_empty() {
                return (steps, copied);
            }
            steps += 1;
            copied += copies.len();
        }
    }

    #[test]
    fn shards_are_spread_evenly() {
        let placement = Placement::new(1024, 2, &members(1..=4));
        for worker in 1..=4 {
            let held = placement.held_by(worker).count();
            let owned = (0..1024).filter(|&shard| placement.holders(shard)[0] == worker).count();
            assert!((440..590).contains(&held) && (200..310).contains(&owned), "{held} {owned}");
        }
        let mut counts = [0; 64];
        (0..64_000).for_each(|id| counts[shard_of(3, id, 64) as usize] += 1);
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn copies_lie_on_different_hosts_if_there_are_several() {
        let on = Member::new;
        let two_hosts = [on(1, 1), on(2, 1), on(3, 1), on(4, 2)];
        let placement = Placement::new(256, 2, &two_hosts);
        assert!((0..256).all(|shard| placement.holders(shard).contains(&4)));
        let placement = Placement::new(256, 3, &two_hosts);
        assert!((0..256).all(|shard| placement.holders(shard).len() == 3));
        assert_eq!(Placement::new(8, 3, &members([7])).holders(5), [7]);
    }

    #[test]
    fn a_loss_is_healed_and_moves_no_shard_that_is_whole() {
        let before = Placement::new(256, 2, &members(1..=4));
        let left = before.within(|worker| worker != 2);
        assert_eq!(left.lost().count(), 0);
        let at_risk = before.held_by(2).count();
        assert_eq!(left.at_risk(&members([1, 3, 4])), at_risk);
        let mut healed = left;
        let (_, copied) = settle(&mut healed, &members([1, 3, 4]), 8);
        assert_eq!((copied, healed.at_risk(&members([1, 3, 4]))), (at_risk, 0));
        assert_eq!(healed, Placement::new(256, 2, &members([1, 3, 4])).copied_per_step(8));
        let both = before.within(|worker| worker != 2 && worker != 3);
        let of_both = (0..256).filter(|&shard| {
            let holders = before.holders(shard);
            holders.contains(&2) && holders.contains(&3)
        });
        assert_eq!(both.lost().collect::<Vec<_>>(), of_both.collect::<Vec<_>>());
    }

    #[test]
    fn a_joiner_gets_its_part_and_no_more_than_the_limit_at_once() {
        let mut placement = Placement::new(256, 2, &members(1..=3));
        let joined = members(1..=4);
        placement = placement.copied_per_step(8);
        let copies = placement.copies(&joined);
        assert!(copies.iter().all(|copy| copy.to == 4));
        assert_eq!(copies.len(), 8);
        let (steps, copied) = settle(&mut placement, &joined, 8);
        assert_eq!(placement, Placement::new(256, 2, &joined).copied_per_step(8));
        assert_eq!((placement.held_by(4).count(), steps), (copied, copied.div_ceil(8)));
    }

    #[test]
    fn table_servers_hold_all_shards_if_there_are_as_many_as_copies() {
        let server = |worker, host| Member { serves: true, ..Member::new(worker, host) };
        let workers = members(1..=3);
        // The other host of a worker does not count.
        let mut group = [&workers[..], &[server(4, 9), server(5, 9)]].concat();
        let placement = Placement::new(64, 2, &group);
        let held_by = |placement: &Placement, worker| placement.held_by(worker).count();
        assert_eq!([1, 2, 3, 4, 5].map(|worker| held_by(&placement, worker)), [0, 0, 0, 64, 64]);
        // One of them is lost: the others have its copies until another takes its place.
        group.pop();
        let mut rest = placement.within(|worker| worker != 5);
        assert_eq!((rest.lost().count(), rest.at_risk(&group)), (0, 64));
        settle(&mut rest, &group, 8);
        assert!((0..64).all(|shard| rest.holders(shard)[0] == 4), "it owns all");
        assert_eq!((1..=3).map(|worker| held_by(&rest, worker)).sum::<usize>(), 64);
        group.push(server(6, 9));
        settle(&mut rest, &group, 8);
        assert_eq!([1, 2, 3, 4, 6].map(|worker| held_by(&rest, worker)), [0, 0, 0, 64, 64]);
        // One that leaves hands over to the others.
        group[4].leaves = true;
        settle(&mut rest, &group, 8);
        assert_eq!((held_by(&rest, 6), rest.at_risk(&group)), (0, 0));
    }

    #[test]
    fn a_leaver_gives_its_shards_away() {
        let mut placement = Placement::new(64, 1, &members(1..=3));
        let mut leaving = members(1..=3);
        leaving[1].leaves = true;
        settle(&mut placement, &leaving, 4);
        assert_eq!(placement.held_by(2).count(), 0);
        assert_eq!(placement.within(|worker| worker != 2).lost().count(), 0);
    }
}
