//! Slow links: which link between two workers, or which host, limits the steps.
//!
//! ```text
//!   worker 1 on a ────► worker 2 on b ────► worker 3 on c ────► worker 1     the same bytes on all
//!         limited 95 %          limited 96 %          limited 3 %            host b is slow
//! ```
//!
//! Each member tells for which part of the time the network limited its link. What it does to all
//! links alike is the network's speed, and nothing is said. A link that is limited for most of the
//! time, while the others are for less than half as long, is the slow one; several such links are
//! those of a slow host, if one host is an end of each.
//!
//! The status shows the link, and events tell when it begins and ends to limit the steps.
//!
//! **Invariant:** no link of an earlier generation is compared or shown.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use elasticdl_proto::{Generation, LimitingLink, LinkPace, WorkerId};

use crate::job::time::Time;

/// The links between the members of a generation.
#[derive(Debug, Default)]
pub(crate) struct SlowLinks {
    generation: Generation,
    /// What each member has told lately, the newest last.
    paces: BTreeMap<WorkerId, VecDeque<(Time, LinkPace)>>,
    /// When the links were compared.
    compared: Time,
    /// The link that limits the steps, and when that was found last.
    found: Option<(Time, LimitingLink)>,
    /// The link of which users were told, as it was then, until they are told of its end. It was
    /// found last at this time, or not compared since.
    told: Option<(Time, LimitingLink)>,
}

/// The links from one member, over the time that is compared.
#[derive(Debug, Default)]
struct Sent {
    measured: Duration,
    limited: Duration,
    /// The members to which the network limited it for most of a measurement.
    limited_to: BTreeSet<WorkerId>,
    /// Bytes that went there in these measurements, and for how long they were limited.
    slow: (u64, Duration),
}

impl SlowLinks {
    /// Notes what a member has told. Returns whether the links are to be compared.
    pub(crate) fn note(
        &mut self,
        now: Time,
        generation: Generation,
        from: WorkerId,
        pace: LinkPace,
    ) -> bool {
        if self.generation != generation {
            let told = self.told.take().map(|(_, link)| (now, link));
            *self = Self { generation, compared: now, told, ..Self::default() };
        }
        let paces = self.paces.entry(from).or_default();
        paces.push_back((now, pace));
        if paces.len() > PACES_MAX {
            paces.pop_front();
        }
        let is_due = now.since(self.compared) >= COMPARED_EVERY;
        if is_due {
            self.compared = now;
            self.paces.values_mut().for_each(|paces| {
                paces.retain(|(at, _)| now.since(*at) < WINDOW);
            });
        }
        is_due
    }

    /// The link that the network limits for most of the time, unlike others.
    pub(crate) fn slowest<'a>(
        &self,
        host_of: impl Fn(WorkerId) -> &'a str,
    ) -> Option<LimitingLink> {
        let known = self.paces.iter().map(|(&from, paces)| (from, Sent::over(paces)));
        let known = known.filter(|(_, sent)| sent.measured >= MEASURED_MIN);
        let (limited, others): (Vec<_>, Vec<_>) =
            known.partition(|(_, sent)| sent.part() >= LIMITED);
        let (from, slowest) =
            limited.iter().max_by(|(_, a), (_, b)| a.part().total_cmp(&b.part()))?;
        let least = limited.iter().map(|(_, sent)| sent.part()).fold(1.0, f64::min);
        let others_most = others.iter().map(|(_, sent)| sent.part()).reduce(f64::max)?;
        if others_most > least / 2.0 {
            return None;
        }
        let ends =
            limited.iter().flat_map(|(from, sent)| sent.limited_to.iter().map(|&to| (*from, to)));
        let ends: Vec<(WorkerId, WorkerId)> = ends.collect();
        let host = match &ends[..] {
            [_] => None,
            all => Some(common_host(all, &host_of)?.to_owned()),
        };
        let name = |id| Some(host_of(id)).filter(|host| !host.is_empty()).map(str::to_owned);
        let to = *slowest.limited_to.last()?;
        Some(LimitingLink {
            from: *from,
            from_host: name(*from),
            to,
            to_host: name(to),
            host,
            limited: slowest.part(),
            bytes_per_s: slowest.slow.0 as f64 / slowest.slow.1.as_secs_f64(),
        })
    }

    /// Notes the link that limits the steps, if one does. Returns what is news: that the last one,
    /// between other workers, does no longer, and that this one does.
    pub(crate) fn find(&mut self, now: Time, link: Option<LimitingLink>) -> Vec<String> {
        let ended = self.told.take_if(|(at, told)| match &link {
            Some(link) => !is_known(told, link),
            None => now.since(*at) >= ENDED_AFTER,
        });
        let ended = ended.map(|(_, told)| {
            let sent = self.paces.get(&told.from).map(Sent::over);
            told.ended(sent.filter(|sent| !sent.measured.is_zero()).map(|sent| sent.part()))
        });
        let mut begun = None;
        if let Some(link) = link {
            begun = self.told.is_none().then(|| link.to_string());
            self.told.get_or_insert_with(|| (now, link.clone())).0 = now;
            self.found = Some((now, link));
        }
        ended.into_iter().chain(begun).collect()
    }

    /// The link that limits the steps of this generation, if there is one.
    pub(crate) fn limiting(&self, now: Time, generation: Generation) -> Option<&LimitingLink> {
        let (at, link) = self.found.as_ref().filter(|_| self.generation == generation)?;
        (now.since(*at) < WINDOW).then_some(link)
    }
}

impl Sent {
    fn over(paces: &VecDeque<(Time, LinkPace)>) -> Self {
        let mut sent = Self::default();
        for (_, pace) in paces {
            sent.measured += pace.measured;
            sent.limited += pace.limited;
            if pace.limited >= pace.measured / 2 {
                sent.limited_to.insert(pace.to);
                sent.slow.0 = sent.slow.0.saturating_add(pace.bytes);
                sent.slow.1 += pace.limited;
            }
        }
        sent
    }

    /// Part of the time in which the network limited the links: 0 to 1.
    fn part(&self) -> f64 {
        self.limited.as_secs_f64() / self.measured.as_secs_f64()
    }
}

/// Whether users who know of the link `known` learn nothing from this one: it is of the same host,
/// or of one of its workers.
fn is_known(known: &LimitingLink, link: &LimitingLink) -> bool {
    let is_same_host = known.host.is_some() && known.host == link.host;
    let ends = [link.from, link.to];
    is_same_host || ends.contains(&known.from) || ends.contains(&known.to)
}

/// The host that is an end of each of these links, if there is one and no other.
fn common_host<'a>(
    links: &[(WorkerId, WorkerId)],
    host_of: impl Fn(WorkerId) -> &'a str,
) -> Option<&'a str> {
    let hosts = links.iter().map(|&(from, to)| BTreeSet::from([host_of(from), host_of(to)]));
    let common = hosts.reduce(|known, hosts| &known & &hosts)?;
    let mut named = common.into_iter().filter(|host| !host.is_empty());
    named.next().filter(|_| named.next().is_none())
}

/// Time over which links are compared: what passes sooner is no slow link.
const WINDOW: Duration = Duration::from_secs(20);
/// The least part of it that a link must have been measured.
const MEASURED_MIN: Duration = Duration::from_secs(16);
/// Part of the time in which the network limits a slow link, at least. More than half: two links
/// that are slow in turn are none.
const LIMITED: f64 = 0.6;
/// Time after which a link that is not found any more does not limit the steps: longer than it
/// takes to find the link of a host in the next generation.
const ENDED_AFTER: Duration = Duration::from_secs(40);
const COMPARED_EVERY: Duration = Duration::from_secs(2);
/// Most measurements of a member that are kept.
const PACES_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTS: [&str; 5] = ["", "a", "b", "c", "d"];

    /// The ends of a link, and its host.
    type Found = Option<(u64, u64, Option<String>)>;

    fn at(seconds: u64) -> Time {
        Time(Duration::from_secs(seconds))
    }

    fn pace(to: u64, percent: u64) -> LinkPace {
        let [measured, limited] = [2000, 20 * percent].map(Duration::from_millis);
        LinkPace { to: WorkerId(to), measured, limited, bytes: 24_000_000 }
    }

    /// Tells at `seconds` for which percentage of the time the links in a ring of workers 1, 2, …
    /// were limited. Returns whether they are to be compared.
    fn tell(links: &mut SlowLinks, seconds: u64, percent: &[u64]) -> bool {
        let ring = percent.len() as u64;
        let told = percent.iter().zip(1..).map(|(&percent, from)| {
            let pace = pace(from % ring + 1, percent);
            links.note(at(seconds), Generation(1), WorkerId(from), pace)
        });
        told.fold(false, |any, is_due| any | is_due)
    }

    fn told(percents: &[impl AsRef<[u64]>]) -> SlowLinks {
        let mut links = SlowLinks::default();
        for (turn, percent) in (1..).zip(percents) {
            tell(&mut links, 2 * turn, percent.as_ref());
        }
        links
    }

    fn slowest(links: &SlowLinks, hosts: &[&'static str]) -> Found {
        let link = links.slowest(|id| hosts[id.0 as usize])?;
        assert_eq!(link.from_host.as_deref().unwrap_or_default(), hosts[link.from.0 as usize]);
        assert_eq!(link.to_host.as_deref().unwrap_or_default(), hosts[link.to.0 as usize]);
        Some((link.from.0, link.to.0, link.host))
    }

    #[test]
    fn a_slow_link_or_host_is_named_and_what_is_alike_is_not() {
        let b = || Some("b".to_owned());
        let table: [(&str, &[u64], Found); 13] = [
            ("one link", &[5, 90, 5], Some((2, 3, None))),
            ("one of two links", &[5, 90], Some((2, 1, None))),
            ("both links of a host", &[96, 95, 5], Some((1, 2, b()))),
            ("the same of four", &[95, 96, 5, 40], Some((2, 3, b()))),
            ("all are slow", &[90, 90, 90], None),
            ("both of two", &[90, 90], None),
            ("all are fast", &[5, 5, 5], None),
            ("all are about as slow", &[90, 50, 55], None),
            ("half of the time", &[5, 59, 5], None),
            ("just more than the others", &[31, 61, 5], None),
            ("two links without a common host", &[90, 5, 90, 5], None),
            ("a single link", &[90], None),
            ("no link", &[], None),
        ];
        for (name, percent, expected) in table {
            assert_eq!(slowest(&told(&[percent; 10]), &HOSTS), expected, "{name}");
        }
    }

    #[test]
    fn links_of_unknown_hosts_and_within_a_host_name_no_host() {
        let links = told(&[[96, 95, 5]; 10]);
        assert_eq!(slowest(&links, &[""; 4]), None);
        // Workers 1 and 2 are on one host: both of its links to the other one are slow.
        assert_eq!(slowest(&links, &["", "b", "a", "b"]), None);
        let one = told(&[[5, 95, 5]; 10]);
        assert_eq!(slowest(&one, &[""; 4]), Some((2, 3, None)));
    }

    #[test]
    fn a_link_is_slow_after_most_of_the_time_and_delivers_bytes_meanwhile() {
        let links = told(&[[5, 80, 5]; 7]);
        assert_eq!(slowest(&links, &HOSTS), None, "it is not known for long");
        let link = told(&[[5, 80, 5]; 8]).slowest(|id| HOSTS[id.0 as usize]).unwrap();
        assert_eq!((link.limited, link.bytes_per_s), (0.8, 15e6));
        let mut begins = [[5, 80, 5]; 10];
        begins[..2].fill([5, 5, 5]);
        let link = told(&begins).slowest(|id| HOSTS[id.0 as usize]).unwrap();
        assert_eq!((link.limited, link.bytes_per_s), (0.65, 15e6), "as it is, not as it was");
        let mut passing = [[5, 5, 5]; 10];
        passing[3..8].fill([5, 100, 5]);
        assert_eq!(slowest(&told(&passing), &HOSTS), None);
        let in_turn = [[5, 95, 5], [95, 5, 5]].repeat(5);
        assert_eq!(slowest(&told(&in_turn), &HOSTS), None);
        assert_eq!(slowest(&told(&[[50, 50, 5]; 10]), &HOSTS), None);
    }

    #[test]
    fn a_sender_whose_links_to_several_members_are_slow_names_its_host() {
        let mut links = SlowLinks::default();
        for turn in 1..=10 {
            links.note(at(2 * turn), Generation(1), WorkerId(2), pace(1 + turn % 2 * 2, 95));
            links.note(at(2 * turn), Generation(1), WorkerId(1), pace(3, 1));
        }
        assert_eq!(slowest(&links, &HOSTS), Some((2, 3, Some("b".to_owned()))));
    }

    #[test]
    fn what_was_told_is_forgotten_with_its_generation_and_after_a_while() {
        let mut links = told(&[[5, 90, 5]; 10]);
        // Worker 2 tells nothing any more.
        for turn in 11..=20 {
            links.note(at(2 * turn), Generation(1), WorkerId(1), pace(2, 5));
            links.note(at(2 * turn), Generation(1), WorkerId(3), pace(1, 5));
        }
        assert_eq!((slowest(&links, &HOSTS), links.paces[&WorkerId(1)].len()), (None, 10));
        let mut links = told(&[[5, 90, 5]; 10]);
        assert!(!links.note(at(60), Generation(2), WorkerId(2), pace(3, 90)));
        assert_eq!((links.paces.len(), links.paces[&WorkerId(2)].len()), (1, 1));
        for _ in 0..100 {
            links.note(at(61), Generation(2), WorkerId(2), pace(3, 90));
        }
        assert_eq!(links.paces[&WorkerId(2)].len(), PACES_MAX);
    }

    #[test]
    fn links_are_compared_now_and_then_and_a_slow_one_is_news_once() {
        let mut links = SlowLinks::default();
        let due = [0, 1, 2, 3, 4].map(|seconds| tell(&mut links, seconds, &[5, 5]));
        assert_eq!(due, [false, false, true, false, true]);
        let links = told(&[[5, 90, 5, 5]; 10]);
        let link = links.slowest(|id| HOSTS[id.0 as usize]).unwrap();
        let of_host = LimitingLink { host: Some("b".into()), ..link.clone() };
        let [from, to] = [3, 4].map(WorkerId);
        let next = LimitingLink { from, to, ..link.clone() };
        let [from, to] = [1, 4].map(WorkerId);
        let other = LimitingLink { from, to, ..link.clone() };
        let mut links = SlowLinks::default();
        let seen =
            [(0, &link), (19, &link), (30, &of_host), (40, &next), (50, &link), (69, &other)];
        let news = seen.map(|(seconds, link)| links.find(at(seconds), Some(link.clone())));
        let [none, first] = [vec![], vec![link.to_string()]];
        let superseded = vec![link.ended(None), other.to_string()];
        assert_eq!(news, [&first, &none, &none, &none, &none, &superseded].map(Clone::clone));
        let limiting = [88, 89].map(|seconds| links.limiting(at(seconds), Generation(0)).cloned());
        assert_eq!(limiting, [Some(other.clone()), None]);
        // It is found again, with other figures, and goes.
        assert_eq!(links.find(at(100), Some(LimitingLink { limited: 1.0, ..other.clone() })), none);
        assert_eq!(links.find(at(139), None), none);
        assert_eq!(links.find(at(140), None), [other.ended(None)]);
        assert_eq!((links.find(at(200), None), links.find(at(201), Some(link))), (none, first));
    }

    #[test]
    fn the_end_of_a_slow_link_is_told_with_what_is_measured_then_or_in_a_later_generation() {
        let mut links = told(&[[5, 90, 5]; 10]);
        let link = links.slowest(|id| HOSTS[id.0 as usize]).unwrap();
        links.find(at(20), Some(link.clone()));
        for turn in 11..=30 {
            tell(&mut links, 2 * turn, &[5, 20, 5]);
        }
        assert_eq!(links.find(at(60), None), [link.ended(Some(0.2))]);
        links.find(at(60), Some(link.clone()));
        links.note(at(90), Generation(2), WorkerId(1), pace(3, 5));
        assert_eq!(links.limiting(at(90), Generation(2)), None);
        assert_eq!(links.find(at(129), None), [""; 0]);
        assert_eq!(links.find(at(130), None), [link.ended(None)]);
    }
}
