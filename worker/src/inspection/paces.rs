//! Which link to another member the network limits, for the master.
//!
//! All links of a ring carry the same bytes, so the bytes of a link do not tell whether it is the
//! slow one. The queue of its sender does: on a link that the network limits, bytes wait to be sent
//! while others are on their way. None wait if the sender has nothing to send, and none are on
//! their way if the receiver does not read.
//!
//! The queues are sampled, at irregular times, so that the samples do not follow the rhythm of the
//! steps. Only links that this worker has dialled are: in a ring, sums leave it there. Shared
//! memory and NCCL have none.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use elasticdl_proto::{LinkPace, WorkerId};

use super::links::{connection, sockets};

/// Measures the links to other members.
#[derive(Debug)]
pub(crate) struct PaceSampler {
    links: Vec<SampledLink>,
    /// Begin of the measurement.
    began: Instant,
    /// Time of the last sample.
    sampled: Instant,
    /// Position in the sequence of pauses, of which 2^32 are a cycle.
    turn: u32,
}

#[derive(Debug)]
struct SampledLink {
    to: WorkerId,
    descriptor: i32,
    ends: (SocketAddr, SocketAddr),
    /// Bytes that had arrived before the measurement.
    sent_before: u64,
    /// Bytes that have arrived.
    sent: u64,
    /// Time in which the network held bytes back.
    limited: Duration,
}

impl PaceSampler {
    /// Begins a measurement, without any link.
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self { links: Vec::new(), began: now, sampled: now, turn: 0 }
    }

    /// Takes a sample of each link. Returns the pause until the next one.
    pub(crate) fn sample(&mut self) -> Duration {
        let now = Instant::now();
        let elapsed = now - std::mem::replace(&mut self.sampled, now);
        // A descriptor may have been closed, and may be another connection's now.
        self.links.retain_mut(|link| {
            let found = connection(link.descriptor).filter(|(ends, _)| *ends == link.ends);
            found.is_some_and(|(_, counters)| {
                link.sent = counters.sent;
                if counters.queues() == (true, true) {
                    link.limited += elapsed;
                }
                true
            })
        });
        if self.links.is_empty() {
            return INTERVAL;
        }
        self.turn = self.turn.wrapping_add(GOLDEN_TURN);
        let part = f64::from(self.turn) / f64::from(u32::MAX);
        PAUSE_MIN + (PAUSE_MAX - PAUSE_MIN).mul_f64(part)
    }

    /// The measurement that is due, if there are links: that of the link which was limited longest.
    /// Then begins the next one, with the links to `members`.
    pub(crate) fn poll(&mut self, members: &[(WorkerId, SocketAddr)]) -> Option<LinkPace> {
        let now = Instant::now();
        if now - self.began < INTERVAL {
            return None;
        }
        let measured = self.sampled - self.began;
        let slowest = self.links.iter().max_by_key(|link| (link.limited, link.bytes()));
        let pace = slowest.filter(|_| measured >= Duration::from_micros(1)).map(|link| LinkPace {
            to: link.to,
            measured,
            limited: link.limited,
            bytes: link.bytes(),
        });
        (self.began, self.sampled) = (now, now);
        self.links = links_to(members);
        pace
    }
}

impl SampledLink {
    fn bytes(&self) -> u64 {
        self.sent.saturating_sub(self.sent_before)
    }
}

/// The dialled links to these members; of many, those with most bytes.
fn links_to(members: &[(WorkerId, SocketAddr)]) -> Vec<SampledLink> {
    if members.is_empty() {
        return Vec::new();
    }
    let by_address: BTreeMap<_, _> = members.iter().map(|&(id, address)| (address, id)).collect();
    let link = |descriptor| {
        let (ends, counters) = connection(descriptor)?;
        let to = *by_address.get(&ends.1)?;
        let (sent_before, sent, limited) = (counters.sent, counters.sent, Duration::ZERO);
        Some(SampledLink { to, descriptor, ends, sent_before, sent, limited })
    };
    let mut links: Vec<_> = sockets().filter_map(link).collect();
    links.sort_by_key(|link| Reverse(link.sent));
    links.truncate(LINKS_MAX);
    links
}

/// Time of a measurement.
const INTERVAL: Duration = Duration::from_secs(2);
/// Bounds of the pause between two samples.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_millis(150);
/// The golden section of 2^32: multiples of it are spread evenly.
const GOLDEN_TURN: u32 = 0x9e37_79b9;
/// Links that are sampled: more than neighbours in a ring and its tree.
const LINKS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::super::links::tests::lose_packets;
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A link to worker 7, and its other end.
    fn link() -> (TcpStream, TcpStream, [(WorkerId, SocketAddr); 1]) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let dialled = TcpStream::connect(address).unwrap();
        dialled.set_nonblocking(true).unwrap();
        (dialled, listener.accept().unwrap().0, [(WorkerId(7), address)])
    }

    /// Sends until the kernel accepts no more.
    fn fill(mut link: &TcpStream) {
        loop {
            match link.write(&[0; 1 << 16]) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Samples until the link is in the state that is to last, and then as if a second had passed
    /// since the last sample. Returns the measurement.
    fn measure(
        sampler: &mut PaceSampler,
        members: &[(WorkerId, SocketAddr)],
        is_there: impl Fn(&SampledLink) -> bool,
    ) -> Option<LinkPace> {
        let until = Instant::now() + 60 * SECOND;
        while !is_there(&sampler.links[0]) {
            assert!(Instant::now() < until, "{sampler:?}");
        }
        sampler.began -= 3 * SECOND;
        sampler.sampled = Instant::now() - SECOND;
        sampler.sample();
        let pace = sampler.poll(members);
        assert_eq!(sampler.poll(members), None, "it is not due");
        pace
    }

    fn started(members: &[(WorkerId, SocketAddr)]) -> PaceSampler {
        let mut sampler = PaceSampler::new();
        assert_eq!(sampler.poll(members), None, "it is not due");
        sampler.began -= 3 * SECOND;
        assert_eq!(sampler.poll(members), None, "there was no link");
        assert_eq!(sampler.links.len(), 1);
        sampler
    }

    fn queues(link: &SampledLink) -> (bool, bool) {
        connection(link.descriptor).unwrap().1.queues()
    }

    #[test]
    fn a_network_that_delivers_nothing_limits_a_link_and_a_receiver_that_does_not_read_does_not() {
        let (link, _unread, members) = link();
        let mut sampler = started(&members);
        let idle = measure(&mut sampler, &members, |link| queues(link) == (false, false));
        let idle = idle.unwrap();
        assert_eq!((idle.to, idle.limited, idle.bytes), (WorkerId(7), Duration::ZERO, 0));
        assert!(idle.measured >= 2 * SECOND, "{idle:?}");
        fill(&link);
        let unread = measure(&mut sampler, &members, |link| queues(link) == (true, false));
        let unread = unread.unwrap();
        assert_eq!(unread.limited, Duration::ZERO);
        assert!(unread.bytes > 0);
        let (link, other, members) = self::link();
        lose_packets(&other);
        let mut sampler = started(&members);
        (&link).write_all(&[7]).unwrap();
        let late = measure(&mut sampler, &members, |link| queues(link) == (false, true)).unwrap();
        assert_eq!((late.limited, late.bytes), (Duration::ZERO, 0), "nothing waits to be sent");
        fill(&link);
        let lost = measure(&mut sampler, &members, |link| queues(link) == (true, true)).unwrap();
        assert!((SECOND..lost.measured).contains(&lost.limited), "{lost:?}");
    }

    #[test]
    fn a_connection_that_is_closed_or_leads_to_no_member_is_no_link() {
        let (link, _other, members) = link();
        let mut sampler = started(&members);
        assert!(sampler.sample() < INTERVAL);
        // The descriptor is another connection's now.
        sampler.links[0].ends.0.set_port(0);
        assert_eq!(sampler.sample(), INTERVAL);
        assert!(sampler.links.is_empty());
        drop(link);
        let (_link, _other, _) = self::link();
        assert!(links_to(&members).is_empty() && links_to(&[]).is_empty());
    }

    #[test]
    fn the_pauses_between_samples_are_irregular_and_short() {
        let (_link, _other, members) = link();
        let mut sampler = started(&members);
        let pauses: Vec<_> = (0..100).map(|_| sampler.sample()).collect();
        assert!(pauses.iter().all(|pause| (PAUSE_MIN..=PAUSE_MAX).contains(pause)));
        let mean = pauses.iter().sum::<Duration>() / 100;
        assert!((90..110).contains(&mean.as_millis()), "{mean:?}");
        assert!(pauses.windows(2).all(|two| two[0].abs_diff(two[1]) > PAUSE_MIN / 2));
    }
}
