//! A proxy between workers and their master whose connections can be reset.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Forwards the connections of workers to a master on this machine.
///
/// The threads end with the connections; the listener ends with the process.
pub struct Proxy {
    address: SocketAddr,
    /// File that the workers' script writes the master's address to.
    upstream: PathBuf,
    connections: Arc<Mutex<Vec<[TcpStream; 2]>>>,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Proxy {
    /// Listens on loopback; `folder` is for a file of the proxy.
    pub fn start(folder: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let address = listener.local_addr().expect("a listener has an address");
        let proxy =
            Self { address, upstream: folder.join("upstream"), connections: Arc::default() };
        let (upstream, connections) = (proxy.upstream.clone(), Arc::clone(&proxy.connections));
        std::thread::Builder::new()
            .name("proxy".into())
            .spawn(move || {
                for worker in listener.incoming().flatten() {
                    // A master that is gone refuses connections; so does the proxy.
                    let Ok(master) = connect(&upstream) else { continue };
                    if let (Ok(one), Ok(other)) = (worker.try_clone(), master.try_clone()) {
                        lock(&connections).push([one, other]);
                        forward([&worker, &master]);
                        forward([&master, &worker]);
                    }
                }
            })
            .expect("there is room for a thread");
        proxy
    }

    /// A script for `sh -c` that runs its arguments as a worker that connects to the master through
    /// this proxy.
    pub fn script(&self) -> String {
        let Self { address, upstream, .. } = self;
        let upstream = upstream.display();
        format!(
            "printf %s \"$ELASTICDL_MASTER\" > '{upstream}'.$$; mv '{upstream}'.$$ '{upstream}'; \
             ELASTICDL_MASTER={address} exec \"$@\""
        )
    }

    /// Resets all connections, on both sides, and returns their number.
    pub fn reset_all(&self) -> usize {
        lock(&self.connections).drain(..).map(reset).count()
    }

    /// Resets the connection that was opened last.
    pub fn reset_one(&self) {
        if let Some(ends) = lock(&self.connections).pop() {
            reset(ends);
        }
    }
}

fn lock(connections: &Mutex<Vec<[TcpStream; 2]>>) -> MutexGuard<'_, Vec<[TcpStream; 2]>> {
    connections.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect(upstream: &Path) -> io::Result<TcpStream> {
    let master = std::fs::read_to_string(upstream)?;
    let stream = TcpStream::connect(master)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Forwards bytes until one side ends.
fn forward([from, to]: [&TcpStream; 2]) {
    let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else { return };
    std::thread::spawn(move || {
        let mut bytes = [0; 16 << 10];
        while let Ok(n @ 1..) = from.read(&mut bytes) {
            if to.write_all(&bytes[..n]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}

/// Resets both ends: nothing lingers, and bytes in flight are lost.
fn reset(ends: [TcpStream; 2]) {
    for end in &ends {
        // A connection that has ended already needs no reset.
        let _ = rustix::net::sockopt::set_socket_linger(end.as_fd(), Some(Duration::ZERO));
        let _ = end.shutdown(Shutdown::Both);
    }
}
