//! Compiles every kernel to machine code for every architecture it is declared for and prints what each needs:
//! `check PATH-OF-NVRTC`. A spill that the kernel's file does not name is a failure, and so is a kernel that is missing
//! from the code or has more shared memory than its architecture gives a block.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;

use structures_plugin_api::sdk::Failure;
use structures_plugin_cuda::compiler::{Compiled, Compiler, NVRTC};
use structures_plugin_cuda::kernels::{Abilities, File, FILES, GENERIC};

/// What one kernel needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Needs {
    registers: u32,
    shared: u32,
    stack: u32,
    spilled: u32,
}

fn main() -> ExitCode {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: check PATH-OF-NVRTC");
        return ExitCode::from(2);
    };
    let named = |name: &str| (name == NVRTC).then(|| path.clone().into());
    let compiler = match Compiler::find(named, 13) {
        Ok(compiler) => compiler,
        Err(failure) => {
            eprintln!("{failure}");
            return ExitCode::FAILURE;
        }
    };
    let (major, minor) = compiler.version();
    println!("NVRTC {major}.{minor}");
    println!(
        "{:<34} {:<8} {:>9} {:>7} {:>6} {:>6}",
        "kernel", "arch", "registers", "shared", "stack", "spill"
    );
    let (mut kernels, mut images, mut bytes) = (0, 0, 0);
    let mut wrong = Vec::new();
    for (file, arch, compiled) in all(&compiler) {
        let compiled = match compiled {
            Ok(compiled) => compiled,
            Err(failure) => {
                wrong.push(failure.to_string());
                continue;
            }
        };
        images += 1;
        bytes += compiled.image.len();
        let found = needs(&compiled.log);
        wrong.extend(serialised(file, arch, &compiled.log));
        for kernel in file.kernels(Abilities::of(arch)) {
            let Some(needs) = found.get(&kernel) else {
                wrong.push(format!("{kernel} for {arch}: the code does not have it"));
                continue;
            };
            kernels += 1;
            println!(
                "{kernel:<34} {arch:<8} {:>9} {:>7} {:>6} {:>6}",
                needs.registers, needs.shared, needs.stack, needs.spilled
            );
            wrong.extend(judged(file, &kernel, arch, *needs));
        }
    }
    println!(
        "{kernels} kernels in {images} images of {bytes} bytes, {} wrong",
        wrong.len()
    );
    for what in &wrong {
        eprintln!("{what}");
    }
    match wrong.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Everything compiled, in the order of files and architectures, on as many threads as there are cores.
fn all(compiler: &Compiler) -> Vec<(&'static File, &'static str, Result<Compiled, Failure>)> {
    let archs = || GENERIC.iter().map(|arch| arch.trim_end_matches("+PTX"));
    let jobs: Vec<_> = FILES
        .iter()
        .flat_map(|file| archs().map(move |arch| (file, arch)))
        .collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((file, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let compiled = compiler.compile(&file.source(), arch);
            let mut done = done.lock().unwrap_or_else(|e| e.into_inner());
            done.push((*file, *arch, compiled));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(file, arch, _)| {
        jobs.iter()
            .position(|(f, a)| f.name == file.name && a == arch)
    });
    done
}

/// The assembler's word that products of warpgroups wait for each other: they run, at a fraction of the speed.
fn serialised(file: &File, arch: &str, log: &str) -> Option<String> {
    let mut lines = log.lines();
    let line = lines.find(|line| line.contains("wgmma") && line.contains("serialized"))?;
    Some(format!("{}.cu for {arch}: {}", file.name, line.trim()))
}

fn judged(file: &File, kernel: &str, arch: &str, needs: Needs) -> Option<String> {
    let explained = file.spills().contains(&kernel);
    match needs.spilled > 0 && !explained {
        true => Some(format!(
            "{kernel} for {arch}: {} bytes spilled, unexplained in {}.cu",
            needs.spilled, file.name
        )),
        false => None,
    }
}

/// Reads the assembler's lines: the entry it compiles, its stack and spills, its registers and shared memory.
fn needs(log: &str) -> BTreeMap<String, Needs> {
    let mut all: BTreeMap<String, Needs> = BTreeMap::new();
    let mut name = String::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            name = rest.split('\'').next().unwrap_or_default().to_string();
            all.insert(name.clone(), Needs::default());
        }
        let Some(needs) = all.get_mut(&name) else {
            continue;
        };
        let before = |unit: &str| -> Option<u32> {
            let head = line
                .split(unit)
                .next()
                .filter(|head| head.len() < line.len())?;
            head.split_whitespace().last()?.parse().ok()
        };
        needs.stack += before(" bytes stack frame").unwrap_or(0);
        needs.spilled +=
            before(" bytes spill stores").unwrap_or(0) + before(" bytes spill loads").unwrap_or(0);
        needs.registers += before(" registers").unwrap_or(0);
        needs.shared += before(" bytes smem").unwrap_or(0);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas         .     8 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 143 registers, used 1 barriers, 8 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers, 388 bytes cmem[0]
";

    #[test]
    fn the_assemblers_lines_are_read() {
        let found = needs(LOG);
        let one = Needs {
            registers: 143,
            shared: 512,
            stack: 8,
            spilled: 28,
        };
        assert_eq!(found["one"], one);
        assert_eq!((found["two"].registers, found["two"].spilled), (20, 0));
        let file = &FILES[0];
        assert!(judged(file, "one", "sm_90a", one).is_some());
        assert!(judged(file, "two", "sm_90a", found["two"]).is_none());
        assert!(serialised(file, "sm_90a", LOG).is_none());
        let said = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized";
        assert!(serialised(file, "sm_90a", said).is_some());
    }
}
