//! Workers on other hosts: each is a process of a command such as `ssh HOST`, which runs
//! `elasticdl host-process` there. That reads a [`HostLaunch`] from its input, runs the program,
//! and ends as it does, or with the connection.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::job::LaunchId;

/// The hosts of a job's workers, and how they are reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hosts {
    /// At least one, each with another name.
    pub hosts: Vec<Host>,
    /// A command that runs its arguments on the host whose name replaces [`HOST`]: at least one
    /// word.
    pub command: Vec<String>,
    /// Path of the `elasticdl` command on all hosts.
    pub elasticdl: OsString,
    /// Working directory of the workers.
    pub folder: OsString,
}

/// A host of workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// As the command knows it.
    pub name: String,
    /// The share of the workers that it gets, beside those of the others.
    pub slots: u32,
}

/// What takes the place of a host's name in the command.
pub const HOST: &str = "{host}";

/// How a host starts a worker. It is not given on a command line, where other users would read the
/// token.
#[derive(Debug, Serialize, Deserialize)]
pub struct HostLaunch {
    /// Path of the program.
    pub program: OsString,
    /// Arguments of the program.
    pub args: Vec<OsString>,
    /// Environment variables, in addition to those of the host.
    pub env: Vec<(OsString, OsString)>,
    /// Working directory.
    pub folder: OsString,
    /// Contents of files, by the variable that names the file.
    pub files: Vec<(String, Vec<u8>)>,
    /// The worker's slot on the host, and the number of slots there.
    pub slot: (u32, u32),
}

impl Hosts {
    /// Parses a list of hosts: `NAME` or `NAME slots=N` in each line, `#` before comments.
    ///
    /// # Errors
    /// A message that names the line, and what it should be.
    pub fn parse(text: &str) -> Result<Vec<Host>, String> {
        let mut hosts: Vec<Host> = Vec::new();
        let text = text.trim_start_matches('\u{feff}');
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default();
            let mut words = line.split_whitespace();
            let Some(name) = words.next() else { continue };
            let of_line = |wrong: String| {
                format!("line {number}: {wrong}; a line is HOST or HOST slots=N, such as `node1`")
            };
            // The command would take it for an option.
            let is_option = name.starts_with('-') || name.contains('=');
            let slots = name.split_once(':').filter(|(_, slots)| slots.parse::<u32>().is_ok());
            if is_option || slots.is_some() || name.contains(|c| SHELL.contains(c)) {
                return Err(of_line(format!("`{name}` is no name of a host")));
            }
            let mut slots = 1;
            for word in words {
                let parsed = word.strip_prefix("slots=").and_then(|number| number.parse().ok());
                let wrong = || of_line(format!("`{word}` is not slots=N"));
                slots = parsed.filter(|slots| (1..=SLOTS_MAX).contains(slots)).ok_or_else(wrong)?;
            }
            if hosts.iter().any(|host| host.name == name) {
                return Err(of_line(format!("{name} is there twice; give it more slots")));
            }
            hosts.push(Host { name: name.into(), slots });
        }
        if hosts.is_empty() { Err("it names no host".into()) } else { Ok(hosts) }
    }

    /// The command that starts a worker on a host.
    pub(super) fn words(&self, host: usize) -> Vec<OsString> {
        let name = &self.hosts[host].name;
        let words = self.command.iter().map(|word| word.replace(HOST, name).into());
        words.chain([self.elasticdl.clone(), "host-process".into()]).collect()
    }
}

/// The sum of the slots of all hosts.
#[must_use]
pub fn slots_of(hosts: &[Host]) -> u32 {
    hosts.iter().map(|host| host.slots).sum()
}

/// A worker's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Index of its host.
    pub(super) host: usize,
    /// Its slot there; beyond the host's slots if more workers run than there are slots.
    pub(super) slot: u32,
}

/// Which worker runs where. Workers that a former master has started are not known here.
#[derive(Debug)]
pub(super) struct Places {
    /// The hosts' names and slots.
    hosts: Vec<Host>,
    taken: BTreeMap<LaunchId, Place>,
    /// When the last start on a host has failed, unless another has succeeded since.
    failed: Vec<Option<Instant>>,
}

impl Places {
    pub(super) fn new(hosts: &Hosts) -> Self {
        let hosts = hosts.hosts.clone();
        Self { failed: vec![None; hosts.len()], taken: BTreeMap::new(), hosts }
    }

    /// Takes a place for a launch: on the host that is filled least, and not on one where a start
    /// has just failed, unless that is so everywhere, nor on one of `avoid` while others have free
    /// slots.
    pub(super) fn take(&mut self, launch: LaunchId, avoid: &[String], now: Instant) -> Place {
        let workers = |host| self.taken.values().filter(move |place| place.host == host).count();
        let rank = |&host: &usize| {
            let is_failing = self.failed[host].is_some_and(|at| now < at + FAILING);
            let Host { name, slots } = &self.hosts[host];
            let filled = (workers(host) as u64 + 1) * PRECISION / u64::from(*slots);
            (is_failing, filled > PRECISION, avoid.contains(name), filled, host)
        };
        let host = (0..self.hosts.len()).min_by_key(rank).expect("there is a host");
        let is_free =
            |slot: &u32| !self.taken.values().any(|place| *place == Place { host, slot: *slot });
        let slot = (0..).find(is_free).expect("there are more numbers than workers");
        let place = Place { host, slot };
        self.taken.insert(launch, place);
        place
    }

    /// A launch has ended. `has_joined`: it had sent its hello.
    pub(super) fn give_back(&mut self, launch: LaunchId, has_joined: bool, now: Instant) {
        if let Some(place) = self.taken.remove(&launch) {
            self.failed[place.host] = (!has_joined).then_some(now);
        }
    }
}

/// What a shell on a host would take for more than a name.
pub const SHELL: &str = " \t\n\"'`$&|;<>()*?!\\~#{}";
/// More slots would be a mistake.
const SLOTS_MAX: u32 = 1024;
/// Of the part of a host's slots that is filled.
const PRECISION: u64 = 1 << 20;
/// How long other hosts are preferred to one where a start has failed.
const FAILING: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_hosts_is_read_and_its_errors_name_the_line() {
        let hosts =
            Hosts::parse("\u{feff}# rack 1\r\nnode1\n\nuser@10.0.0.7 slots=4  # big\n").unwrap();
        let host = |name: &str, slots| Host { name: name.into(), slots };
        assert_eq!(hosts, [host("node1", 1), host("user@10.0.0.7", 4)]);
        for (bad, wrong) in [
            ("a\nb slots=0", "line 2: `slots=0`"),
            ("a max_slots=3", "line 1: `max_slots=3`"),
            ("a\na", "line 2: a is there twice"),
            ("-oProxyCommand=x", "line 1: `-oProxyCommand=x` is no name"),
            ("slots=3", "line 1: `slots=3` is no name"),
            ("a\nb:4", "line 2: `b:4` is no name of a host; a line is HOST or HOST slots=N"),
            ("a;reboot", "line 1: `a;reboot` is no name"),
            ("# none", "names no host"),
        ] {
            let error = Hosts::parse(bad).unwrap_err();
            assert!(error.contains(wrong), "{bad}: {error}");
        }
    }

    #[test]
    fn workers_fill_the_slots_of_hosts_evenly_and_avoid_hosts_that_fail() {
        let list = Hosts::parse("a slots=2\nb slots=4\nc slots=1").unwrap();
        let hosts = Hosts {
            hosts: list,
            command: vec!["ssh".into(), "-p22".into(), "me@{host}".into()],
            elasticdl: "/bin/elasticdl".into(),
            folder: "/".into(),
        };
        assert_eq!(slots_of(&hosts.hosts), 7);
        assert_eq!(hosts.words(1), ["ssh", "-p22", "me@b", "/bin/elasticdl", "host-process"]);
        let (mut places, now) = (Places::new(&hosts), Instant::now());
        let mut take = |launch| places.take(LaunchId(launch), &[], now).host;
        let mut filled = [0; 3];
        (1..=7).for_each(|launch| filled[take(launch)] += 1);
        assert_eq!(filled, [2, 4, 1]);
        // The place of the one that ends is taken, with its slot.
        let first = places.taken[&LaunchId(1)];
        places.give_back(LaunchId(1), true, now);
        assert_eq!(places.take(LaunchId(8), &[], now), first);
        // A host where a start has failed is avoided for a while, and if no other is left.
        let failing = places.taken[&LaunchId(8)].host;
        places.give_back(LaunchId(8), false, now);
        assert_ne!(places.take(LaunchId(9), &[], now).host, failing);
        places.give_back(LaunchId(9), false, now + FAILING);
        assert_eq!(places.take(LaunchId(10), &[], now + FAILING).host, failing);
        // So is one of these, while others have free slots.
        (1..=10).for_each(|launch| places.give_back(LaunchId(launch), true, now));
        let avoid = ["a".to_owned()];
        let mut is_there = |launch| places.take(LaunchId(launch), &avoid, now).host == 0;
        assert_eq!(
            [11, 12, 13, 14, 15, 16].map(&mut is_there),
            [false, false, false, false, false, true]
        );
    }
}
