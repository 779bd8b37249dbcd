//! Exchange: mailboxes in shared memory between ranks of a host, links between all others, driven
//! together by one thread.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::algorithm::chain_topology::Side;
use crate::net::fence::GroupRegistration;
use crate::net::link::Link;
use crate::net::neighbours::Links;
use crate::net::progress::Progress;
use crate::net::spin_wait::SpinWait;
use crate::shm::Mail;
use crate::transfer::{Direction, Fault, LocalFault, Pair, PairLinks, Ports, TransferProgress};

/// Returns the progress of an exchange. `hides_bytes`: in a hierarchy, where byte counts of the
/// ring's links show only a part of it.
pub(super) fn show(progress: &Progress, hides_bytes: bool) -> TransferProgress<'_> {
    let mut progress = TransferProgress::both_ways(progress);
    if hides_bytes {
        progress.hide_bytes();
    }
    progress
}

/// Links to and from `rank`: those of the ring to a neighbour, one of each direction if there are
/// two.
pub(super) fn links_to<'a>(
    rank: usize,
    ring: &'a Links,
    further: &'a BTreeMap<usize, Arc<Link>>,
) -> PairLinks<'a> {
    let next = Direction { link: &ring.next.link, side: Some(Side::Next) };
    let prev = Direction { link: &ring.prev.link, side: Some(Side::Prev) };
    match (rank == ring.next.rank, rank == ring.prev.rank) {
        (true, true) => PairLinks { to: next, from: prev },
        (true, false) => PairLinks { to: next, from: next },
        (false, true) => PairLinks { to: prev, from: prev },
        (false, false) => {
            let link = further.get(&rank).expect("links to all other ranks were built");
            let direction = Direction { link, side: None };
            PairLinks { to: direction, from: direction }
        }
    }
}

/// `own`: what this rank gives to itself.
pub(super) fn run(
    registration: &GroupRegistration,
    own: Pair<'_>,
    mut mail: Option<Mail<'_>>,
    mut ports: Ports<'_>,
) -> Result<(), Fault> {
    let mut spin_wait = mail.as_ref().map_or_else(|| ports.spin_wait(), Mail::spin_wait);
    let result = pump(registration, own, &mut mail, &mut ports, &mut spin_wait);
    if let Some(mail) = mail {
        mail.finish(spin_wait, result.is_err());
    }
    result
}

/// Moves payloads until all are sent and received. Nothing here waits for a single rank.
fn pump(
    registration: &GroupRegistration,
    own: Pair<'_>,
    mail: &mut Option<Mail<'_>>,
    ports: &mut Ports<'_>,
    spin_wait: &mut SpinWait,
) -> Result<(), Fault> {
    let mut own = Some(own);
    loop {
        if registration.check().is_err() {
            return Err(Fault::Local(LocalFault::Aborted));
        }
        let mut has_moved = ports.step()?;
        if let Some(mail) = mail {
            has_moved |= mail.step().map_err(Fault::Local)?;
        }
        // Payloads for others are on their way meanwhile.
        if let Some(own) = own.take() {
            own.copy();
        }
        let open_mail = mail.as_ref().filter(|mail| !mail.is_done());
        if ports.is_done() && open_mail.is_none() {
            return Ok(());
        }
        if has_moved {
            spin_wait.reset();
            continue;
        }
        if spin_wait.should_spin() {
            continue;
        }
        spin_wait.reset();
        match open_mail {
            Some(mail) => {
                mail.sleep(&ports.fds()).map_err(Fault::Local)?;
                ports.check_ends()?;
            }
            // A rank of the host that has delivered and received everything may leave.
            None => ports.wait()?,
        }
    }
}

#[cfg(test)]
mod tests;
