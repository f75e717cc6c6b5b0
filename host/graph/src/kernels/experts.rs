//! `topk_route` and `experts`: which experts a token takes, and what those make of it.

use candle_core::Tensor;

use super::act::{act, ActKind};
use super::read::{dense, rows, tensor, Read};
use super::{unfit, Outcome};

/// Softmax over the last dim; the `k` largest stay (the first of equal ones), the others become 0.
pub(super) fn topk_route(x: &Tensor, k: usize, normalise: bool) -> Outcome<Tensor> {
    let x = dense(x)?;
    let width = x.dims().last().copied().unwrap_or(0);
    if k == 0 || k > width {
        return unfit(format!("x {:?} has no {k} experts to choose", x.dims()));
    }
    let read = Read::of(&x);
    let scores = read.all()?;
    let mut out = vec![0f32; scores.len()];
    rows(&mut out, width, |at, row| {
        let scores = &scores[at * width..][..width];
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = scores.iter().map(|s| (s - max).exp()).sum();
        let mut order: Vec<usize> = (0..width).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        for e in &order[..k] {
            row[*e] = (scores[*e] - max).exp() / sum;
        }
        if normalise {
            let kept: f32 = order[..k].iter().map(|e| row[*e]).sum();
            row.iter_mut().for_each(|p| *p /= kept);
        }
    });
    tensor(out, x.dims())
}

/// Sum of what the experts make of each row, weighed by `route`; see the table. Experts in order, so that the sum of a
/// row does not depend on the other rows.
pub(super) fn experts(
    x: &Tensor,
    route: &Tensor,
    gate_up: &Tensor,
    down: &Tensor,
    kind: ActKind,
) -> Outcome<Tensor> {
    let (&[e, double, d], &[de, dd, inner]) = (gate_up.dims(), down.dims()) else {
        return unfit(format!(
            "gate_up {:?}, down {:?} are not [E,2I,D], [E,D,I]",
            gate_up.dims(),
            down.dims()
        ));
    };
    let width = x.dims().last().copied().unwrap_or(0);
    let count = x.elem_count() / width.max(1);
    let fits = (de, dd, double) == (e, d, 2 * inner)
        && width == d
        && route.dims().last() == Some(&e)
        && route.elem_count() == count * e;
    if !fits {
        return unfit(format!(
            "x {:?}, route {:?}, gate_up {:?}, down {:?} are not [..,D], [..,E], [E,2I,D], [E,D,I]",
            x.dims(),
            route.dims(),
            gate_up.dims(),
            down.dims()
        ));
    }
    let (flat, route) = (dense(x)?.reshape((count, d))?, dense(route)?);
    let (gate_up, down) = (dense(gate_up)?, dense(down)?);
    let weights = Read::of(&route);
    let weights = weights.all()?;
    let mut sum = vec![0f32; count * d];
    for expert in 0..e {
        let taken: Vec<u32> = (0..count)
            .filter(|r| weights[r * e + expert] != 0.0)
            .map(|r| r as u32)
            .collect();
        if taken.is_empty() {
            continue;
        }
        let ids = Tensor::from_slice(&taken, taken.len(), x.device())?;
        let rows = flat.index_select(&ids, 0)?;
        let both = rows.matmul(&gate_up.get(expert)?.t()?)?;
        let gate = act(&both.narrow(1, 0, inner)?, kind)?;
        let hidden = (gate * both.narrow(1, inner, inner)?)?;
        let made = hidden.matmul(&down.get(expert)?.t()?)?;
        let made = dense(&made)?;
        let read = Read::of(&made);
        for (row, r) in read.all()?.chunks(d).zip(&taken) {
            let r = *r as usize;
            let weight = weights[r * e + expert];
            for (o, v) in sum[r * d..][..d].iter_mut().zip(row) {
                *o += weight * v;
            }
        }
    }
    tensor(sum, x.dims())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn t(v: &[f32], dims: &[usize]) -> Tensor {
        Tensor::from_vec(v.to_vec(), dims, &Device::Cpu).unwrap()
    }

    fn flat(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    }

    #[test]
    fn the_largest_stay() {
        let x = t(&[0.0, 2f32.ln(), 5f32.ln(), 0.0, 0.0, 0.0], &[2, 3]);
        let near = |got: Tensor, want: [f32; 6]| {
            for (a, b) in flat(&got).iter().zip(want) {
                assert!((a - b).abs() < 1e-6, "{a} {b}");
            }
        };
        let plain = topk_route(&x, 2, false).unwrap();
        let third = 1.0 / 3.0;
        near(plain, [0.0, 0.25, 0.625, third, third, 0.0]);
        let whole = topk_route(&x, 2, true).unwrap();
        near(whole, [0.0, 2.0 / 7.0, 5.0 / 7.0, 0.5, 0.5, 0.0]);
        assert!(topk_route(&x, 4, true).is_err());
    }

    #[test]
    fn experts_by_hand() {
        // D = 1, I = 1: expert e makes relu(g x) * (u x) * w of x.
        let gate_up = t(&[1.0, 2.0, -1.0, 3.0], &[2, 2, 1]);
        let down = t(&[10.0, 100.0], &[2, 1, 1]);
        let x = t(&[2.0, -3.0], &[2, 1]);
        let route = t(&[0.5, 0.5, 0.0, 2.0], &[2, 2]);
        let y = experts(&x, &route, &gate_up, &down, ActKind::Relu).unwrap();
        // Row 0: 0.5*(2*4*10) + 0.5*0; row 1: 2*(3*-9*100).
        assert_eq!(flat(&y), [40.0, -5400.0]);
        assert!(experts(&x, &x, &gate_up, &down, ActKind::Relu).is_err());
    }
}
