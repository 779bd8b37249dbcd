//! Which links are encrypted.

use std::io;
use std::net::{IpAddr, TcpStream};

use super::cipher::Protection;

/// Which links are encrypted. The two sides of each link authenticate each other in any case.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
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
    /// How the worker at `own` protects a link that it has dialled to the worker at `peer`.
    /// `has_digests`: if it does not encrypt it.
    pub(super) fn protection(
        self,
        (own, peer): (IpAddr, IpAddr),
        link: &TcpStream,
        has_digests: bool,
    ) -> io::Result<Protection> {
        let encrypts = match self {
            Self::Auto => own != peer || leaves_host(link)?,
            Self::Off => false,
            Self::On => true,
        };
        Ok(match has_digests {
            _ if encrypts => Protection::Encryption,
            true => Protection::Digests,
            false => Protection::None,
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
        let table = [
            (LinkEncryption::Auto, [false, true]),
            (LinkEncryption::Off, [false, false]),
            (LinkEncryption::On, [true, true]),
        ];
        for (choice, expected) in table {
            for (has_digests, otherwise) in [(false, Protection::None), (true, Protection::Digests)]
            {
                let found = [here, there]
                    .map(|peer| choice.protection((here, peer), &link, has_digests).unwrap());
                let expected = expected.map(|encrypts| match encrypts {
                    true => Protection::Encryption,
                    false => otherwise,
                });
                assert_eq!(found, expected, "{choice:?}");
            }
            assert_eq!(
                choice.requires(&link).unwrap(),
                choice == LinkEncryption::On,
                "{choice:?} within a host"
            );
        }
    }
}
