//! Which links are encrypted.

use std::io;
use std::net::{IpAddr, TcpStream};
use std::sync::atomic::{AtomicU8, Ordering};

/// Which links are encrypted. The two sides of each link authenticate each other in any case.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(u8)]
pub enum LinkEncryption {
    /// Links between hosts. Members with one address are on one host, as for shared memory.
    #[default]
    Auto,
    /// None: an attacker who reads or modifies the network's traffic reads or modifies the model.
    Off,
    /// All links.
    On,
}

impl LinkEncryption {
    /// Whether the worker at `own` encrypts a link that it has dialled to the worker at `peer`.
    pub(super) fn applies(self, own: IpAddr, peer: IpAddr, link: &TcpStream) -> io::Result<bool> {
        Ok(match self {
            Self::Auto => own != peer || leaves_host(link)?,
            Self::Off => false,
            Self::On => true,
        })
    }

    /// Whether an accepted link must be encrypted. An acceptor does not know the address at which
    /// the others dial the peer; the operating system knows whether the link leaves this host.
    pub(super) fn requires(self, link: &TcpStream) -> io::Result<bool> {
        match self {
            Self::Auto => leaves_host(link),
            Self::Off => Ok(false),
            Self::On => Ok(true),
        }
    }
}

/// A choice that changes before the first link is dialled, and that the acceptor reads.
#[derive(Debug, Default)]
pub(crate) struct SharedLinkEncryption(AtomicU8);

impl SharedLinkEncryption {
    pub(crate) fn set(&self, choice: LinkEncryption) {
        self.0.store(choice as u8, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> LinkEncryption {
        let stored = self.0.load(Ordering::Relaxed);
        [LinkEncryption::Auto, LinkEncryption::Off, LinkEncryption::On]
            .into_iter()
            .find(|choice| *choice as u8 == stored)
            .expect("only choices are stored")
    }
}

/// Packets between two addresses of which both are this host's stay in its kernel.
fn leaves_host(link: &TcpStream) -> io::Result<bool> {
    let peer = link.peer_addr()?.ip();
    Ok(!peer.to_canonical().is_loopback() && link.local_addr()?.ip() != peer)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    #[test]
    fn auto_encrypts_between_addresses_and_not_within_one() {
        let [here, there] = [1, 2].map(|host| IpAddr::from(Ipv4Addr::new(127, 0, 0, host)));
        let listener = TcpListener::bind((here, 0)).unwrap();
        let link = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let applies = |choice: LinkEncryption, peer| choice.applies(here, peer, &link).unwrap();
        let table = [
            (LinkEncryption::Auto, [false, true]),
            (LinkEncryption::Off, [false, false]),
            (LinkEncryption::On, [true, true]),
        ];
        let shared = SharedLinkEncryption::default();
        assert_eq!(shared.get(), LinkEncryption::Auto);
        for (choice, expected) in table {
            assert_eq!([here, there].map(|peer| applies(choice, peer)), expected, "{choice:?}");
            let (accepted, _) = (choice.requires(&link).unwrap(), shared.set(choice));
            assert_eq!(accepted, choice == LinkEncryption::On, "{choice:?} within a host");
            assert_eq!(shared.get(), choice);
        }
    }
}
