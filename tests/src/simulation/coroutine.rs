//! Threads of simulated processes.
//!
//! The shipped code blocks: it waits for messages, links, and records. In the simulation each of
//! its threads is a coroutine, with a stack of its own. A thread acts on the world by [`act`], and
//! waits by [`until`]: the world continues it later.
//!
//! **Invariant:** one thread runs at a time, and no time passes while it runs.

#![allow(unsafe_code, reason = "a thread finds its way back to the world by a pointer")]

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::rc::Rc;

use corosensei::stack::DefaultStack;
use corosensei::{CoroutineResult, Yielder};

use super::clock::Micros;
use super::state::thread::ThreadId;
use super::world::World;

/// What a thread does to the world, whenever the world wakes it, until the result is true: then the
/// thread continues.
pub(super) type Request = Box<dyn FnMut(&mut World, ThreadId) -> bool>;

/// A thread that has not ended.
pub(super) struct Coroutine {
    /// `None` only while it is dropped.
    stack: Option<corosensei::Coroutine<(), Request, ()>>,
    /// What it waits for.
    request: Option<Request>,
}

impl Coroutine {
    pub(super) fn new(body: impl FnOnce() + 'static) -> Self {
        let stack = STACKS.with_borrow_mut(Vec::pop);
        let stack = stack
            .map_or_else(|| DefaultStack::new(STACK_BYTES), Ok)
            .expect("there is memory for a few stacks");
        let stack = corosensei::Coroutine::with_stack(stack, move |yielder, ()| {
            YIELDER.set(yielder);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(body))
                && !panic.is::<Killed>()
            {
                resume_unwind(panic);
            }
        });
        Self { stack: Some(stack), request: None }
    }

    /// What the thread waits for, or else wants next when it runs at the time `now`; `None`: it has
    /// ended.
    pub(super) fn next_request(&mut self, now: Micros) -> Option<Request> {
        if let Some(request) = self.request.take() {
            return Some(request);
        }
        NOW.set(now);
        match self.stack.as_mut().filter(|stack| !stack.done())?.resume(()) {
            CoroutineResult::Yield(request) => Some(request),
            CoroutineResult::Return(()) => None,
        }
    }

    /// The thread waits for `request`.
    pub(super) fn keep(&mut self, request: Request) {
        self.request = Some(request);
    }
}

impl fmt::Debug for Coroutine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Coroutine")
    }
}

/// A thread that has not ended is unwound.
impl Drop for Coroutine {
    fn drop(&mut self) {
        let Some(mut stack) = self.stack.take() else { return };
        let running = YIELDER.replace(ptr::null());
        stack.force_unwind();
        YIELDER.set(running);
        STACKS.with_borrow_mut(|stacks| stacks.push(stack.into_stack()));
    }
}

/// Does something to the world, as this thread, whenever the world wakes it, until there is a
/// result.
pub(super) fn until<T: 'static>(
    mut attempt: impl FnMut(&mut World, ThreadId) -> Option<T> + 'static,
) -> T {
    let result = Rc::new(Cell::new(None));
    let to = Rc::clone(&result);
    suspend(Box::new(move |world, thread| {
        let result = attempt(world, thread);
        let has_result = result.is_some();
        to.set(result);
        has_result
    }));
    result.take().expect("the world continues a thread that has a result")
}

/// Does something to the world, as this thread.
pub(super) fn act<T: 'static>(what: impl FnOnce(&mut World, ThreadId) -> T + 'static) -> T {
    let mut what = Some(what);
    until(move |world, thread| what.take().map(|what| what(world, thread)))
}

/// As [`act`], and waits until the world wakes this thread.
pub(super) fn act_and_wait(what: impl FnOnce(&mut World, ThreadId) + 'static) {
    let mut what = Some(what);
    until(move |world, thread| match what.take() {
        Some(what) => {
            what(world, thread);
            None
        }
        None => Some(()),
    });
}

/// As [`act`], when something is dropped, which may be because the process is killed: then nothing
/// is done.
pub(super) fn act_on_drop(what: impl FnOnce(&mut World, ThreadId) + 'static) {
    if !YIELDER.get().is_null() {
        act(what);
    }
}

/// The time of the world.
pub(super) fn now() -> Micros {
    NOW.get()
}

fn suspend(request: Request) {
    let yielder = YIELDER.get();
    if yielder.is_null() {
        resume_unwind(Box::new(Killed));
    }
    // SAFETY: this is the yielder of the running thread. It is set when the thread starts and
    // whenever it is continued, and lives on the thread's stack until its end.
    unsafe { &*yielder }.suspend(request);
    YIELDER.set(yielder);
}

/// The process is killed, and what has caught that goes on.
struct Killed;

thread_local! {
    /// The way back to the world; null while a thread is unwound.
    static YIELDER: Cell<*const Yielder<(), Request>> = const { Cell::new(ptr::null()) };
    static NOW: Cell<Micros> = const { Cell::new(0) };
    /// Stacks of threads that have ended.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// The unoptimized code of a trainer needs a quarter of it.
const STACK_BYTES: usize = 256 << 10;
